"""Which matrices each pair of a token and an expert takes of its token's adapter, and segments of pairs with the same.

Tables of experts' adapters have an entry for each expert of each place. Pairs are sorted by expert, and within an
expert by token. Plans put rows with the same adapter next to each other, so pairs with one entry are mostly neighbours.
What `pagebus.kernels.lora` makes of tokens and adapters it makes of pairs and entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.lora.plan import DECODE_TOKENS, PROMPT_TOKENS, AdapterPlan
from pagebus.kernels.lora.segments import Segments
from pagebus.kernels.moe.sorting import SortedPairs

BLOCK = 1024
"""Pairs that a program looks at. Segments end at multiples of fewer, so none reaches into the next program's."""


class PairPlan(NamedTuple):
    """``plan``: entries and segments of pairs in their order; ``token`` [P]: whose inputs each pair reads, in that
    order too (0 behind the last pair); ``place`` [P]: 0, 1, 2 and so on, for kernels that leave pairs in their order;
    ``total`` [1]: pairs that have an expert, all int32."""

    plan: AdapterPlan
    token: torch.Tensor
    place: torch.Tensor
    total: torch.Tensor


def segment_pairs(num_pairs: int, num_experts: int, *, invariant: bool = False) -> int:
    """The pairs of a segment, at most. ``invariant``: the same for any number of pairs."""
    return DECODE_TOKENS if invariant or num_pairs < PROMPT_TOKENS * num_experts else PROMPT_TOKENS


def plan_pairs_reference(
    experts: torch.Tensor, of_token: torch.Tensor, pairs: SortedPairs, num_experts: int, tokens: int
) -> PairPlan:
    """experts [T, k] int32 (-1: none) with their ``pairs``, and the place of each token's adapter ``of_token`` [T] (-1:
    none). Segments are of up to ``tokens`` pairs."""
    (count, top_k), flat = experts.shape, experts.flatten()
    total, device = int((flat >= 0).sum()), experts.device
    order, entry = pairs.order[:total].long(), torch.full((count * top_k,), -1, dtype=torch.int32, device=device)
    token = torch.zeros(count * top_k, dtype=torch.int32, device=device)
    token[:total] = (order // top_k).int()
    adapter = of_token[order // top_k]
    entry[:total] = torch.where(adapter >= 0, adapter * num_experts + flat[order], -1)
    found: list[list[int]] = []
    for place, each in enumerate(entry.tolist()):
        if each >= 0:
            if found and place % tokens and sum(found[-1][:2]) == place and found[-1][2] == each:
                found[-1][1] += 1
            else:
                found.append([place, 1, each])
    table = torch.zeros(3, count * top_k, dtype=torch.int32, device=device)
    table[:, : len(found)] = torch.tensor(found, dtype=torch.int32, device=device).view(-1, 3).T
    first, counts, entries = table
    number = torch.tensor([len(found)], dtype=torch.int32, device=device)
    plan = AdapterPlan(Segments(first, counts, entries, number), entry, tokens)
    places = torch.arange(count * top_k, dtype=torch.int32, device=device)
    return PairPlan(plan, token, places, torch.tensor([total], dtype=torch.int32, device=device))


@triton.jit
def _entry(place, total, order_ptr, experts_ptr, of_token_ptr, num_experts, TOP_K: tl.constexpr):
    """Token and entry (-1: none) of the pairs at these places of the order."""
    there = (place >= 0) & (place < total)
    pair = tl.load(order_ptr + place, mask=there, other=0)
    expert = tl.load(experts_ptr + pair, mask=there, other=0)
    adapter = tl.load(of_token_ptr + pair // TOP_K, mask=there, other=-1)
    return pair // TOP_K, tl.where(adapter >= 0, adapter * num_experts + expert, -1)


@triton.jit(do_not_specialize=["num_pairs", "num_experts"])
def _pair_entries_kernel(
    experts_ptr,  # [P]
    of_token_ptr,  # [T]
    order_ptr,  # [P], undefined behind the last pair with an expert
    counts_ptr,  # [E]
    token_ptr,  # [P] out
    place_ptr,  # [P] out
    entry_ptr,  # [P] out
    starts_ptr,  # [C] out, segments of each block of pairs
    total_ptr,  # [1] out
    num_pairs,  # P
    num_experts,  # E
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    BINS: tl.constexpr,  # E or more
    BLOCK: tl.constexpr,
):
    block, bin_ = tl.program_id(0), tl.arange(0, BINS)
    total = tl.sum(tl.load(counts_ptr + bin_, mask=bin_ < num_experts, other=0), axis=0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    here = place < num_pairs
    token, entry = _entry(place, total, order_ptr, experts_ptr, of_token_ptr, num_experts, TOP_K)
    _, before = _entry(place - 1, total, order_ptr, experts_ptr, of_token_ptr, num_experts, TOP_K)
    if block == 0:
        tl.store(total_ptr, total)
    tl.store(token_ptr + place, token, mask=here)
    tl.store(place_ptr + place, place, mask=here)
    tl.store(entry_ptr + place, entry, mask=here)
    starts = (entry >= 0) & ((place % TOKENS == 0) | (entry != before))
    tl.store(starts_ptr + block, tl.sum(starts.to(tl.int32), axis=0))


@triton.jit
def _later(left, right):
    return tl.maximum(left, right)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _pair_segments_kernel(
    entry_ptr,  # [P]
    starts_ptr,  # [C]
    first_ptr,  # [P] out
    count_ptr,  # [P] out
    adapter_ptr,  # [P] out
    number_ptr,  # [1] out
    num_pairs,  # P
    num_blocks,  # C
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,  # a multiple of TOKENS
    BLOCKS: tl.constexpr,  # C or more
):
    block, each = tl.program_id(0), tl.arange(0, BLOCKS)
    starts = tl.load(starts_ptr + each, mask=each < num_blocks, other=0)
    number = tl.sum(tl.where(each < block, starts, 0), axis=0)
    if block == 0:
        tl.store(number_ptr, tl.sum(starts, axis=0))
    place = block * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(entry_ptr + place, mask=place < num_pairs, other=-1)
    before = tl.load(entry_ptr + place - 1, mask=(place > 0) & (place <= num_pairs), other=-1)
    behind = tl.load(entry_ptr + place + 1, mask=place + 1 < num_pairs, other=-1)
    begins = (entry >= 0) & ((place % TOKENS == 0) | (entry != before))
    ends = (entry >= 0) & ((place % TOKENS == TOKENS - 1) | (entry != behind))
    index = number + tl.cumsum(begins.to(tl.int32), axis=0) - 1
    first = tl.associative_scan(tl.where(begins, place, -1), 0, _later)
    tl.store(first_ptr + index, place, mask=begins)
    tl.store(adapter_ptr + index, entry, mask=begins)
    tl.store(count_ptr + index, place - first + 1, mask=ends)


def plan_pairs(
    experts: torch.Tensor, of_token: torch.Tensor, pairs: SortedPairs, num_experts: int, tokens: int
) -> PairPlan:
    """As `plan_pairs_reference`, by two launches. They never let later kernels begin early: kernels of adapters read
    plans before they wait."""
    num_pairs, device = experts.numel(), experts.device
    assert experts.is_contiguous()
    blocks = -(-num_pairs // BLOCK)
    token, place, entry, first, count, adapter = torch.empty(6, num_pairs, dtype=torch.int32, device=device)
    starts, (number, total) = experts.new_empty(blocks), experts.new_empty(2, 1)
    _pair_entries_kernel[(blocks,)](
        experts, of_token, pairs.order, pairs.counts, token, place, entry, starts, total, num_pairs,
        num_experts,
        TOP_K=experts.shape[1], TOKENS=tokens, BINS=next_power_of_2(num_experts), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _pair_segments_kernel[(blocks,)](
        entry, starts, first, count, adapter, number, num_pairs, blocks,
        TOKENS=tokens, BLOCK=BLOCK, BLOCKS=next_power_of_2(blocks), num_warps=8,
    )  # fmt: skip
    return PairPlan(AdapterPlan(Segments(first, count, adapter, number), entry, tokens), token, place, total)
