"""Which adapter each token of a step has, and segments short enough for a tile, made on the device by one launch.

A captured graph replays it with any mix of adapters. Kernels of the step may read the plan before they wait for the
kernels in front of them (`pagebus.kernels.common.pdl`): none of them starts before all of it is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.lora.segments import Segments

FEW_TOKENS, DECODE_TOKENS, PROMPT_TOKENS = 1024, 16, 64
"""Passes of up to this many tokens have segments of 16 tokens at most, others of 64."""
SMALL_BLOCK, BLOCK = 256, 1024
"""Tokens that are looked at together: of passes of this many and fewer, and of others."""
PRODUCTS = 1024
"""Products of a pass whose programs may wait for each other."""


class Arrivals:
    """Where products of one pass count their programs: ``counts`` [PRODUCTS] int32 are 0 when the plan is made, and
    each product has the next."""

    __slots__ = ("_taken", "counts")

    def __init__(self, counts: torch.Tensor) -> None:
        self.counts = counts
        self._taken = 0

    def take(self) -> int | None:
        """A count that no other product of the pass has; None: there are no more."""
        if self._taken == len(self.counts):
            return None
        self._taken += 1
        return self._taken - 1


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """``segments`` end at every multiple of ``tokens``; ``of_token`` [T] int32 is each token's adapter, or -1. Without
    ``arrivals`` no program of a product waits for others. With them, a plan serves one pass."""

    segments: Segments
    of_token: torch.Tensor
    tokens: int
    arrivals: Arrivals | None = None


def segment_tokens(num_tokens: int, *, invariant: bool = False) -> int:
    """The tokens of a segment, at most. ``invariant``: the same for any number of tokens."""
    return DECODE_TOKENS if invariant or num_tokens <= FEW_TOKENS else PROMPT_TOKENS


def most_segments(num_tokens: int, runs: int, tokens: int) -> int:
    """How many segments there can be, if tokens come in ``runs`` of neighbours with the same adapter."""
    return max(1, min(num_tokens, -(-num_tokens // tokens) + runs))


def plan_adapters_reference(
    adapters: torch.Tensor, query_start: torch.Tensor, num_tokens: int, runs: int, tokens: int
) -> AdapterPlan:
    """Row r has adapter ``adapters[r]`` [R] int32, -1: none, and tokens ``query_start[r]:query_start[r + 1]`` [R + 1].
    Tokens behind the last row have none."""
    rows = torch.repeat_interleave(adapters, query_start.diff()).int()
    of_token = torch.full((num_tokens,), -1, dtype=torch.int32, device=adapters.device)
    first = int(query_start[0])
    of_token[first : first + len(rows)] = rows
    found: list[list[int]] = []
    for token, adapter in enumerate(of_token.tolist()):
        if adapter >= 0:
            if found and token % tokens and sum(found[-1][:2]) == token and found[-1][2] == adapter:
                found[-1][1] += 1
            else:
                found.append([token, 1, adapter])
    table = torch.zeros(3, most_segments(num_tokens, runs, tokens), dtype=torch.int32)
    table[:, : len(found)] = torch.tensor(found, dtype=torch.int32).view(-1, 3).T
    first_token, count, adapter = table.to(adapters.device)
    number = torch.tensor([len(found)], dtype=torch.int32, device=adapters.device)
    arrivals = Arrivals(torch.zeros(PRODUCTS, dtype=torch.int32, device=adapters.device))
    return AdapterPlan(Segments(first_token, count, adapter, number), of_token, tokens, arrivals)


@triton.jit
def _adapter_of(token, adapters_ptr, query_start_ptr, num_rows, levels):
    """The adapter of each token [BLOCK]: that of the last row that begins at or before it."""
    row = tl.zeros(token.shape, tl.int32)
    for level in range(levels):
        later = row + (1 << (levels - 1 - level))
        begin = tl.load(query_start_ptr + later, mask=later < num_rows, other=0)
        row = tl.where((later < num_rows) & (begin <= token), later, row)
    inside = (token >= tl.load(query_start_ptr + row)) & (token < tl.load(query_start_ptr + row + 1))
    return tl.where(inside, tl.load(adapters_ptr + row), -1)


@triton.jit
def _later(left, right):
    return tl.maximum(left, right)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "capacity", "levels"])
def _plan_adapters_kernel(
    adapters_ptr,  # [R]
    query_start_ptr,  # [R + 1]
    of_token_ptr,  # [T] out
    first_ptr,  # [M] out
    count_ptr,  # [M] out
    adapter_ptr,  # [M] out
    number_ptr,  # [1] out
    counts_ptr,  # [PRODUCTS] out
    num_rows,  # R
    num_tokens,  # T
    capacity,  # M
    levels,  # 2 to the power of it is R or more
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,  # a multiple of TOKENS
    PRODUCTS: tl.constexpr,
):
    tl.store(counts_ptr + tl.arange(0, PRODUCTS), tl.zeros((PRODUCTS,), tl.int32))
    number = 0
    for begin in range(0, num_tokens, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        here = token < num_tokens
        adapter = _adapter_of(token, adapters_ptr, query_start_ptr, num_rows, levels)
        before = _adapter_of(token - 1, adapters_ptr, query_start_ptr, num_rows, levels)
        behind = _adapter_of(token + 1, adapters_ptr, query_start_ptr, num_rows, levels)
        tl.store(of_token_ptr + token, adapter, mask=here)
        adapted = here & (adapter >= 0)
        starts = adapted & ((token % TOKENS == 0) | (adapter != before))
        ends = adapted & ((token % TOKENS == TOKENS - 1) | (adapter != behind) | (token == num_tokens - 1))
        index = number + tl.cumsum(starts.to(tl.int32), axis=0) - 1
        first = tl.associative_scan(tl.where(starts, token, -1), 0, _later)
        inside = index < capacity
        tl.store(first_ptr + index, token, mask=starts & inside)
        tl.store(adapter_ptr + index, adapter, mask=starts & inside)
        tl.store(count_ptr + index, token - first + 1, mask=ends & inside)
        number += tl.sum(starts.to(tl.int32), axis=0)
    tl.store(number_ptr, tl.minimum(number, capacity))


def plan_adapters(
    adapters: torch.Tensor, query_start: torch.Tensor, num_tokens: int, runs: int, tokens: int
) -> AdapterPlan:
    """As `plan_adapters_reference`. It never lets later kernels begin early: see this module."""
    device, num_rows = adapters.device, len(adapters)
    assert query_start.shape == (num_rows + 1,)
    capacity = most_segments(num_tokens, runs, tokens)
    # Each list begins at a multiple of 16 bytes: where it did not, other kernels would be compiled.
    first, count, adapter = torch.empty(3, -(-capacity // 4) * 4, dtype=torch.int32, device=device)[:, :capacity]
    number = torch.empty(1, dtype=torch.int32, device=device)
    counts = torch.empty(PRODUCTS, dtype=torch.int32, device=device)
    of_token = torch.empty(num_tokens, dtype=torch.int32, device=device)
    _plan_adapters_kernel[(1,)](
        adapters, query_start, of_token, first, count, adapter, number, counts, num_rows, num_tokens,
        capacity, (num_rows - 1).bit_length(), TOKENS=tokens, BLOCK=BLOCK if num_tokens > SMALL_BLOCK else SMALL_BLOCK,
        PRODUCTS=PRODUCTS, num_warps=8 if num_tokens > SMALL_BLOCK else 4,
    )  # fmt: skip
    return AdapterPlan(Segments(first, count, adapter, number), of_token, tokens, Arrivals(counts))


def plan_step(adapters: torch.Tensor, query_start: torch.Tensor, num_tokens: int) -> AdapterPlan:
    """The plan of a pass, whatever its rows have."""
    return plan_adapters(adapters, query_start, num_tokens, len(adapters), segment_tokens(num_tokens))


def plan_step_invariant(adapters: torch.Tensor, query_start: torch.Tensor, num_tokens: int) -> AdapterPlan:
    """`plan_step` for products whose results are independent of other tokens."""
    return plan_adapters(adapters, query_start, num_tokens, len(adapters), segment_tokens(num_tokens, invariant=True))


def plan_step_reference(adapters: torch.Tensor, query_start: torch.Tensor, num_tokens: int) -> AdapterPlan:
    """`plan_step` on any device."""
    return plan_adapters_reference(adapters, query_start, num_tokens, len(adapters), segment_tokens(num_tokens))
