"""Pairs of a token and one of its experts, sorted by expert and cut into items, on the device.

A pair's number is token * k + its place among the token's choices. Each expert has a program, which looks at all pairs;
of many pairs it has one for each chunk of them, and a kernel before counts each chunk's. So there are no atomics, an
expert's pairs are in the order of tokens, and nothing depends on which program is first. Sizes of buffers, and grids,
depend on the number of pairs alone, so a captured CUDA graph serves any content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

ITEM_FIELDS = 4
FEW_PAIRS, MOST_PAIRS = 512, 2048
"""A program looks at so many at once, at least and at most. More are cut into chunks of the latter."""
CHUNKS = 16
"""Whose counts a program reads at once."""


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """P pairs in items of at most ``tokens`` pairs.

    ``order`` [P] int32: the pairs' numbers, expert by expert; those without an expert are in none of its first places.
    ``items`` [I, 4] int32: expert, its first place in ``order``, how many; the first ``num_items`` [1] int32 are valid.
    ``counts`` [E] int32: pairs of each expert.
    """

    tokens: int
    order: torch.Tensor
    items: torch.Tensor
    num_items: torch.Tensor
    counts: torch.Tensor


def most_items(num_pairs: int, num_experts: int, tokens: int) -> int:
    """How many items so many pairs can be cut into at most."""
    begun = min(num_pairs, num_experts)
    return begun + (num_pairs - begun) // tokens


def sort_pairs_reference(experts: torch.Tensor, num_experts: int, tokens: int) -> SortedPairs:
    """experts [T, k] int32, -1: none -> their pairs in items of ``tokens``."""
    flat = experts.flatten().long()
    order = torch.where(flat < 0, num_experts, flat).sort(stable=True).indices.int()
    counts = torch.bincount(flat[flat >= 0], minlength=num_experts).int()
    items, first = [], 0
    for expert, count in enumerate(counts.tolist()):
        items += [[expert, first + begin, min(tokens, count - begin), 0] for begin in range(0, count, tokens)]
        first += count
    table = order.new_zeros(most_items(len(flat), num_experts, tokens), ITEM_FIELDS)
    table[: len(items)] = order.new_tensor(items).view(-1, ITEM_FIELDS)
    return SortedPairs(tokens, order, table, order.new_tensor([len(items)]), counts)


@triton.jit
def _load_experts(experts_ptr, begin, num_pairs, BLOCK: tl.constexpr):
    """Of the pairs from ``begin`` on."""
    pair = begin + tl.arange(0, BLOCK)
    return tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-1)


@triton.jit
def _count(ids, num_experts, BINS: tl.constexpr):
    """Pairs of each expert."""
    counts = tl.histogram(tl.where(ids < 0, num_experts, ids), BINS)
    return tl.where(tl.arange(0, BINS) < num_experts, counts, 0)


@triton.jit
def _store_items(expert, counts, items_ptr, num_items_ptr, counts_ptr, TOKENS: tl.constexpr, BINS: tl.constexpr):
    """Cut an expert's pairs into items; ``counts`` are those of all experts. Returns where its pairs begin."""
    bin_, items = tl.arange(0, BINS), (counts + TOKENS - 1) // TOKENS
    count = tl.sum(tl.where(bin_ == expert, counts, 0), axis=0)
    first = tl.sum(tl.where(bin_ < expert, counts, 0), axis=0)
    first_item = tl.sum(tl.where(bin_ < expert, items, 0), axis=0)
    tl.store(counts_ptr + expert, count)
    if expert == 0:
        tl.store(num_items_ptr, tl.sum(items, axis=0))
    for begin in range(0, count, TOKENS):
        target = items_ptr + (first_item + begin // TOKENS) * 4
        tl.store(target, expert)
        tl.store(target + 1, first + begin)
        tl.store(target + 2, tl.minimum(count - begin, TOKENS))
    return first


@triton.jit
def _store_order(expert, ids, begin, first, order_ptr, BLOCK: tl.constexpr):
    """The numbers of an expert's pairs among those from ``begin`` on; the first belongs at place ``first``."""
    mine = (ids == expert).to(tl.int32)
    rank = first + tl.cumsum(mine, axis=0) - 1
    tl.store(order_ptr + rank, begin + tl.arange(0, BLOCK), mask=mine > 0)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _sort_kernel(
    experts_ptr,  # [P], P at most BLOCK
    order_ptr,  # [P]
    items_ptr,  # [I, 4]
    num_items_ptr,  # [1]
    counts_ptr,  # [E]
    num_pairs,  # P
    num_experts,  # E
    TOKENS: tl.constexpr,  # of an item
    BINS: tl.constexpr,  # more than E
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ids = _load_experts(experts_ptr, 0, num_pairs, BLOCK)
    counts = _count(ids, num_experts, BINS)
    first = _store_items(expert, counts, items_ptr, num_items_ptr, counts_ptr, TOKENS, BINS)
    _store_order(expert, ids, 0, first, order_ptr, BLOCK)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _count_kernel(
    experts_ptr,  # [P]
    chunk_counts_ptr,  # [C, BINS]
    num_pairs,
    num_experts,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    chunk = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = _count(_load_experts(experts_ptr, chunk * BLOCK, num_pairs, BLOCK), num_experts, BINS)
    tl.store(chunk_counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _sort_chunks_kernel(
    experts_ptr,  # [P]
    chunk_counts_ptr,  # [C, BINS]
    order_ptr,  # [P]
    items_ptr,  # [I, 4]
    num_items_ptr,  # [1]
    counts_ptr,  # [E]
    num_pairs,
    num_chunks,  # C
    TOKENS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,  # pairs of a chunk
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    expert, chunk, bin_ = tl.program_id(0), tl.program_id(1), tl.arange(0, BINS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ids = _load_experts(experts_ptr, chunk * BLOCK, num_pairs, BLOCK)
    counts, before = tl.zeros((BINS,), tl.int32), tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_chunks, CHUNKS):
        row = begin + tl.arange(0, CHUNKS)
        place = row[:, None] * BINS + bin_[None, :]
        some = tl.load(chunk_counts_ptr + place, mask=(row < num_chunks)[:, None], other=0)
        counts += tl.sum(some, axis=0)
        before += tl.sum(tl.where((row < chunk)[:, None], some, 0), axis=0)
    if chunk == 0:
        _store_items(expert, counts, items_ptr, num_items_ptr, counts_ptr, TOKENS, BINS)
    first = tl.sum(tl.where(bin_ < expert, counts, 0) + tl.where(bin_ == expert, before, 0), axis=0)
    _store_order(expert, ids, chunk * BLOCK, first, order_ptr, BLOCK)


def sort_pairs(experts: torch.Tensor, num_experts: int, tokens: int) -> SortedPairs:
    """experts [T, k] int32, -1: none -> their pairs in items of ``tokens``, a power of two."""
    assert experts.is_contiguous()
    assert experts.dtype == torch.int32
    num_pairs, device, bins = experts.numel(), experts.device, next_power_of_2(num_experts + 1)
    empty = [(num_pairs,), (most_items(num_pairs, num_experts, tokens), ITEM_FIELDS), (1,), (num_experts,)]
    buffers = [torch.empty(shape, dtype=torch.int32, device=device) for shape in empty]
    block = min(MOST_PAIRS, max(FEW_PAIRS, next_power_of_2(num_pairs)))
    how: dict[str, Any] = {"BINS": bins, "BLOCK": block, "num_warps": 4, **pdl(device)}
    if num_pairs <= block:
        _sort_kernel[(num_experts,)](experts, *buffers, num_pairs, num_experts, TOKENS=tokens, **how)
        return SortedPairs(tokens, *buffers)
    chunks = -(-num_pairs // block)
    chunk_counts = torch.empty((chunks, bins), dtype=torch.int32, device=device)
    _count_kernel[(chunks,)](experts, chunk_counts, num_pairs, num_experts, **how)
    _sort_chunks_kernel[(num_experts, chunks)](
        experts, chunk_counts, *buffers, num_pairs, chunks, TOKENS=tokens, CHUNKS=CHUNKS, **how
    )
    return SortedPairs(tokens, *buffers)
