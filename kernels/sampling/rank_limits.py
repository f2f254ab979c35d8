"""The limits of :mod:`pagebus.kernels.sampling.limits` where each rank has the logits of a range of the vocabulary.

Ranks tell each other the largest logit of a row, then how many of theirs lie in each step below the largest of all,
then those values that the threshold must be among. All find it in the same merged list, so they have the same bits.
Nearly flat rows, whose lists are too long, need all logits: which these are is known to all, and to no host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pagebus.kernels.common.triton import constant, tl, triton
from pagebus.kernels.sampling.limits import (
    BINS,
    BLOCK,
    LIST_BLOCK,
    _cut,
    _load,
    _mass,
    bin_of,
    last_bin,
    least_kept,
)
from pagebus.kernels.sampling.sampling import GREEDY_BELOW, thresholds_reference

LIST_SIZE, BINS_SIZE = 1024, 129
"""Values that a rank's list of a row can hold (4 KiB), and what it tells of a row's bins: counts, and its mass."""
LISTED, BIN_WORDS = constant(LIST_SIZE), constant(BINS_SIZE)
TYPICAL = ("slots_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "num_rows")
"""What no kernel is compiled anew for."""


class RowLimits(NamedTuple):
    """What slots [S] want, as in `sample_reference`, and the ``slots`` [R] of the rows."""

    slots: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


@triton.jit
def _wanted(
    row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB: tl.constexpr, GREEDY: tl.constexpr
):
    """What a row wants: temperature, top_k, top_p, min_p; whether top_k limits it; whether anything does; and whether
    anything but min_p does."""
    slot = tl.load(slots_ptr + row)
    heat, top_k = tl.load(temperature_ptr + slot), tl.load(top_k_ptr + slot)
    top_p, min_p = tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    counted = (top_k > 0) & (top_k < VOCAB)
    searched = (heat >= GREEDY) & ((top_p < 1.0) | counted)
    limited = (heat >= GREEDY) & ((min_p > 0.0) | searched)
    return heat, top_k, top_p, min_p, counted, limited, searched


@triton.jit
def _highest(peaks_ptr, row, num_rows, RANKS: tl.constexpr):
    """The largest logit of any rank."""
    highest = tl.load(peaks_ptr + row)
    for rank in tl.static_range(1, RANKS):
        highest = tl.maximum(highest, tl.load(peaks_ptr + rank * num_rows + row))
    return highest


@triton.jit
def _all_bins(bins_ptr, row, num_rows, RANKS: tl.constexpr):
    """How many logits of all ranks lie in each bin, and their mass: added up in the order of ranks."""
    place = tl.arange(0, BINS)
    counts, mass = tl.zeros([BINS], tl.int32), tl.zeros((), tl.float32)
    for rank in tl.static_range(RANKS):
        told = bins_ptr + (rank * num_rows + row) * BIN_WORDS
        counts += tl.load(told + place)
        mass += tl.load(told + BINS).to(tl.float32, bitcast=True)
    return counts, mass


@triton.jit(do_not_specialize=TYPICAL)
def _peaks_kernel(
    logits_ptr,  # [R, W]
    out_ptr,  # [R] float32
    slots_ptr,  # [R]
    temperature_ptr,  # [S], as the next
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stride_logits,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,  # W
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, _, _, _, _, limited, _ = _wanted(row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB, GREEDY)
    if limited == 0:
        tl.store(out_ptr + row, float("-inf"))
        return
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        maxima = tl.maximum(maxima, _load(logits_ptr + row * stride_logits, start + tl.arange(0, BLOCK), WIDTH))
    tl.store(out_ptr + row, tl.max(maxima, axis=0))


@triton.jit(do_not_specialize=TYPICAL)
def _bins_kernel(
    logits_ptr,  # [R, W]
    peaks_ptr,  # [N, R]
    out_ptr,  # [R, BIN_WORDS] int32: counts, and the mass of what min_p keeps as the bits of a float32
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stride_logits,
    num_rows,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat, _, _, min_p, _, _, searched = _wanted(
        row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB, GREEDY
    )
    highest = _highest(peaks_ptr, row, num_rows, RANKS)
    if (searched == 0) | (highest == float("-inf")):
        return
    cut, per_heat = least_kept(highest, heat, min_p), 1.0 / heat
    masses, counts = tl.zeros([BLOCK], tl.float32), tl.zeros([BINS], tl.int32)
    for start in range(0, WIDTH, BLOCK):
        x = _load(logits_ptr + row * stride_logits, start + tl.arange(0, BLOCK), WIDTH)
        masses += tl.where(x >= cut, tl.exp((x - highest) * per_heat), 0.0)
        counts += tl.histogram(bin_of(x, highest, per_heat), BINS)
    tl.store(out_ptr + row * BIN_WORDS + tl.arange(0, BINS), counts)
    tl.store(out_ptr + row * BIN_WORDS + BINS, tl.sum(masses, axis=0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=TYPICAL)
def _lists_kernel(
    logits_ptr,  # [R, W]
    peaks_ptr,  # [N, R]
    bins_ptr,  # [N, R, BIN_WORDS]
    out_ptr,  # [R, 1 + LISTED] float32: how many values there are, and as many as there is room for
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    stride_logits,
    num_rows,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat, top_k, top_p, min_p, counted, _, searched = _wanted(
        row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB, GREEDY
    )
    highest = _highest(peaks_ptr, row, num_rows, RANKS)
    if (searched == 0) | (highest == float("-inf")):
        return
    cut, per_heat = least_kept(highest, heat, min_p), 1.0 / heat
    counts, _ = _all_bins(bins_ptr, row, num_rows, RANKS)
    last, _ = last_bin(counts, cut, counted, top_k, top_p, highest, per_heat)
    found, values = tl.full((), 0, tl.int32), out_ptr + row * (1 + LISTED) + 1
    if last < BINS - 1:
        for start in range(0, WIDTH, BLOCK):
            x = _load(logits_ptr + row * stride_logits, start + tl.arange(0, BLOCK), WIDTH)
            taken = bin_of(x, highest, per_heat) <= last
            place = found + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(values + place, x, mask=taken & (place < LISTED))
            found += tl.sum(taken.to(tl.int32), axis=0)
    tl.store(out_ptr + row * (1 + LISTED), found.to(tl.float32))


@triton.jit(do_not_specialize=TYPICAL)
def _listed_cuts_kernel(
    peaks_ptr,  # [N, R]
    bins_ptr,  # [N, R, BIN_WORDS]
    lists_ptr,  # [N, R, 1 + LISTED]
    merged_ptr,  # [R, N * LISTED] float32 scratch
    cuts_ptr,  # [R] out
    flat_ptr,  # [R] int32 out: 1 where the lists do not tell the threshold, and cuts are min_p's
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    num_rows,
    VOCAB: tl.constexpr,
    RANKS: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat, top_k, top_p, min_p, counted, limited, searched = _wanted(
        row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB, GREEDY
    )
    highest = _highest(peaks_ptr, row, num_rows, RANKS)
    cut = least_kept(highest, heat, min_p)
    tl.store(flat_ptr + row, 0)
    if (searched == 0) | (highest == float("-inf")):
        tl.store(cuts_ptr + row, tl.where(limited, cut, float("-inf")))
        return
    per_heat = 1.0 / heat
    counts, mass = _all_bins(bins_ptr, row, num_rows, RANKS)
    last, _ = last_bin(counts, cut, counted, top_k, top_p, highest, per_heat)
    flat, found = tl.where(last < BINS - 1, 0, 1), tl.full((), 0, tl.int32)
    merged, place = merged_ptr + row * (RANKS * LISTED), tl.arange(0, LISTED)
    for rank in tl.static_range(RANKS):
        told = lists_ptr + (rank * num_rows + row) * (1 + LISTED)
        count = tl.load(told).to(tl.int32)
        flat = tl.where(count > LISTED, 1, flat)
        count = tl.where(flat == 0, count, 0)
        tl.store(merged + found + place, tl.load(told + 1 + place, mask=place < count), mask=place < count)
        found += count
    tl.debug_barrier()  # other threads of the program read what these wrote
    if (flat == 0) & (counted == 0):
        held = _mass(merged, found, cut, highest, per_heat, LIST_BLOCK)
        flat = tl.where(held >= top_p * mass, 0, 1)
    if flat == 0:
        cut = _cut(merged, found, cut, counted, top_k, top_p, mass, highest, per_heat, LIST_BLOCK)
    tl.store(cuts_ptr + row, cut)
    tl.store(flat_ptr + row, flat)


@triton.jit(do_not_specialize=TYPICAL)
def _flat_cuts_kernel(
    logits_ptr,  # [R, VOCAB], of flat rows alone
    peaks_ptr,  # [N, R]
    bins_ptr,  # [N, R, BIN_WORDS]
    cuts_ptr,  # [R] in, of flat rows out
    flat_ptr,  # [R] int32
    slots_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    num_rows,
    VOCAB: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(flat_ptr + row) == 0:
        return
    heat, top_k, top_p, _, counted, _, _ = _wanted(
        row, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB, GREEDY
    )
    highest = _highest(peaks_ptr, row, num_rows, RANKS)
    _, mass = _all_bins(bins_ptr, row, num_rows, RANKS)
    cut = tl.load(cuts_ptr + row)
    cut = _cut(logits_ptr + row * VOCAB, VOCAB, cut, counted, top_k, top_p, mass, highest, 1.0 / heat, BLOCK)
    tl.store(cuts_ptr + row, cut)


def rank_cuts_reference(parts: list[torch.Tensor], limits: RowLimits) -> torch.Tensor:
    """The smallest kept logit [R] of each row that has limits, of the logits [R, W] of all ranks; else -inf."""
    slots = limits.slots.long()
    heat, top_k, top_p, min_p = (
        each[slots] for each in (limits.temperature, limits.top_k, limits.top_p, limits.min_p)
    )  # fmt: skip
    whole = torch.cat(parts, dim=1).float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    cuts = thresholds_reference(whole, heat.clamp(min=GREEDY_BELOW), top_k, top_p, min_p).squeeze(1)
    return torch.where(heat < GREEDY_BELOW, -torch.inf, cuts)


def rank_cuts(
    logits: torch.Tensor, limits: RowLimits, vocab: int, gather: Callable[[torch.Tensor], torch.Tensor],
    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """As `rank_cuts_reference`, of a rank with ``logits`` [R, W] float32 of a vocabulary of ``vocab``, the same bits on
    all ranks.

    ``gather``: x of all ranks, [N, ...]; ``gather_rows``: logits [R, vocab] of all ranks in the rows that are not 0 in
    an int32 [R], which is the same on all ranks.
    """
    num_rows, width = logits.shape
    assert logits.stride(1) == 1
    assert logits.dtype == torch.float32
    device, part = logits.device, {"VOCAB": vocab, "WIDTH": width, "BLOCK": BLOCK, "GREEDY": GREEDY_BELOW}
    cuts = torch.empty(num_rows, dtype=torch.float32, device=device)
    if not num_rows:
        return cuts
    own, grid = torch.empty_like(cuts), (num_rows,)
    _peaks_kernel[grid](logits, own, *limits, logits.stride(0), **part, num_warps=16)
    peaks = gather(own)
    ranks = {"RANKS": len(peaks)}
    own = torch.empty((num_rows, BINS_SIZE), dtype=torch.int32, device=device)
    _bins_kernel[grid](logits, peaks, own, *limits, logits.stride(0), num_rows, **part, **ranks, num_warps=16)
    bins = gather(own)
    own = torch.empty((num_rows, 1 + LIST_SIZE), dtype=torch.float32, device=device)
    _lists_kernel[grid](logits, peaks, bins, own, *limits, logits.stride(0), num_rows, **part, **ranks, num_warps=16)
    lists = gather(own)
    merged = torch.empty((num_rows, len(lists) * LIST_SIZE), dtype=torch.float32, device=device)
    flat = torch.empty(num_rows, dtype=torch.int32, device=device)
    whole = {"VOCAB": vocab, "GREEDY": GREEDY_BELOW, **ranks}
    _listed_cuts_kernel[grid](
        peaks, bins, lists, merged, cuts, flat, *limits, num_rows, LIST_BLOCK=LIST_BLOCK, **whole, num_warps=16
    )
    every = gather_rows(logits, flat)
    assert every.is_contiguous()
    _flat_cuts_kernel[grid](every, peaks, bins, cuts, flat, *limits, num_rows, BLOCK=BLOCK, **whole, num_warps=16)
    return cuts
