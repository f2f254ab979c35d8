"""Pairs of a token and one of its experts, sorted by expert and cut into items, on the device.

A pair's number is token * k + its place among the token's choices. Each expert has a program, which looks at all pairs:
so there are no atomics, an expert's pairs are in the order of tokens, and nothing depends on which program is first.
Sizes of buffers, and grids, depend on the number of pairs alone, so a captured CUDA graph serves any content.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

ITEM_FIELDS = 4
FEW_PAIRS, MOST_PAIRS = 512, 8192
"""A program looks at so many at once, at least and at most."""


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


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _sort_kernel(
    experts_ptr,  # [P]
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
    expert, bin_, place = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        ids = tl.load(experts_ptr + begin + place, mask=begin + place < num_pairs, other=-1)
        counts += tl.histogram(tl.where(ids < 0, num_experts, ids), BINS)
    counts = tl.where(bin_ < num_experts, counts, 0)
    items = (counts + TOKENS - 1) // TOKENS
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
    if count > 0:
        for begin in range(0, num_pairs, BLOCK):
            ids = tl.load(experts_ptr + begin + place, mask=begin + place < num_pairs, other=-1)
            mine = (ids == expert).to(tl.int32)
            rank = first + tl.cumsum(mine, axis=0) - 1
            tl.store(order_ptr + rank, begin + place, mask=mine > 0)
            first += tl.sum(mine, axis=0)


def sort_pairs(experts: torch.Tensor, num_experts: int, tokens: int) -> SortedPairs:
    """experts [T, k] int32, -1: none -> their pairs in items of ``tokens``, a power of two."""
    assert experts.is_contiguous()
    assert experts.dtype == torch.int32
    num_pairs, device = experts.numel(), experts.device
    empty = [(num_pairs,), (most_items(num_pairs, num_experts, tokens), ITEM_FIELDS), (1,), (num_experts,)]
    buffers = [torch.empty(shape, dtype=torch.int32, device=device) for shape in empty]
    block = min(MOST_PAIRS, max(FEW_PAIRS, next_power_of_2(num_pairs)))
    if target_of(device) is None:
        block = next_power_of_2(num_pairs)
    _sort_kernel[(num_experts,)](
        experts, *buffers, num_pairs, num_experts,
        TOKENS=tokens, BINS=next_power_of_2(num_experts + 1), BLOCK=block,
        num_warps=4 if block <= 2048 else 8, **pdl(device),
    )  # fmt: skip
    return SortedPairs(tokens, *buffers)
