"""Finds the smallest logit that min_p, top_k and top_p leave of each row, without a sort.

The bits of a logit, reordered, compare as unsigned integers. The threshold is built from the top, two bits at a time:
it is the largest for which the tokens at or above it suffice (in count for top_k, in probability for top_p). A
histogram of the distance to the largest logit first gives a short list that contains the answer, so that the 16 steps
read a few hundred values. Only a nearly flat row is searched as a whole.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.triton import constant, tl, triton

BLOCK = 4096  # values read at a time from a row
LIST_BLOCK = 1024  # and from a short list
SHORT_LIST = 16384  # values a row's short list can hold
BINS = constant(128)
BINS_PER_UNIT = constant(4.0)  # of logit / temperature


@triton.jit
def _ordered(x):
    """float32 -> uint32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _from_ordered(key):
    """The float32 of an ordered key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _load(source, place, size):
    """Logits, with NaN and what lies past the end as -inf."""
    x = tl.load(source + place, mask=place < size, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _weight(x, counted, highest, per_heat, MASS: tl.constexpr):
    """What the values that count weigh: 1, or exp((logit - highest) / temperature)."""
    return tl.where(counted, tl.exp((x - highest) * per_heat) if MASS else 1.0, 0.0)


@triton.jit
def _mass(source, size, base, highest, per_heat, BLOCK: tl.constexpr):
    """The sum of exp((logit - highest) / temperature) over the values >= base."""
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x = _load(source, start + tl.arange(0, BLOCK), size)
        mass += _weight(x, x >= base, highest, per_heat, True)
    return tl.sum(mass, axis=0)


@triton.jit
def _search(source, size, target, base, highest, per_heat, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest ordered key at or above which at least `target` is held (0 where even all hold less).

    Held is the count, or the mass, of the values with that key or a larger one that are >= base.
    """
    key = tl.full([], 0, tl.uint32)
    step = tl.full([], 0x40000000, tl.uint32)
    for _step in range(16):
        quarter = tl.zeros([BLOCK], tl.float32)
        half = tl.zeros([BLOCK], tl.float32)
        three = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = _load(source, place, size)
            weight = _weight(x, (x >= base) & (place < size), highest, per_heat, MASS)
            ordered = _ordered(x)
            quarter += tl.where(ordered >= key + step, weight, 0.0)
            half += tl.where(ordered >= key + 2 * step, weight, 0.0)
            three += tl.where(ordered >= key + 3 * step, weight, 0.0)
        digit = tl.where(tl.sum(quarter, axis=0) >= target, 1, 0)
        digit = tl.where(tl.sum(half, axis=0) >= target, 2, digit)
        digit = tl.where(tl.sum(three, axis=0) >= target, 3, digit)
        key = key + digit.to(tl.uint32) * step
        step = step >> 2
    return key


@triton.jit
def _cut(source, size, cut, counted, top_k, top_p, mass, highest, per_heat, BLOCK: tl.constexpr):
    """The threshold after top_k and top_p, from min_p's; mass is that of all values >= cut, source what may matter."""
    if counted:
        key = _search(source, size, top_k.to(tl.float32), float("-inf"), highest, per_heat, False, BLOCK)
        cut = tl.maximum(cut, _from_ordered(key))
    if top_p < 1.0:
        if counted:
            mass = _mass(source, size, cut, highest, per_heat, BLOCK)
        # At least the largest stays, however small top_p is.
        key = _search(source, size, tl.maximum(top_p * mass, 1e-30), cut, highest, per_heat, True, BLOCK)
        cut = tl.maximum(cut, tl.where(key == 0, float("-inf"), _from_ordered(key)))
    return cut


@triton.jit
def bin_of(x, highest, per_heat):
    """In which step below the largest a logit lies."""
    return tl.minimum((highest - x) * per_heat * BINS_PER_UNIT, BINS - 1.0).to(tl.int32)


@triton.jit
def last_bin(counts, cut, counted, top_k, top_p, highest, per_heat):
    """Up to which bin values are likely to tell the threshold, from how many each holds; and how many that are.

    Each bin's mass is not known, only guessed from its middle and scaled to the whole; one bin more makes it likely
    enough, and the listed values' own mass decides.
    """
    bins = tl.arange(0, BINS)
    reached = tl.cumsum(counts, axis=0)
    guessed = tl.where(bins <= (highest - cut) * per_heat * BINS_PER_UNIT, counts.to(tl.float32), 0.0)
    guessed = tl.cumsum(guessed * tl.exp(bins.to(tl.float32) * (-1.0 / BINS_PER_UNIT)), axis=0)
    enough = tl.where(counted, reached >= top_k, guessed >= top_p * tl.max(guessed, axis=0))
    last = tl.min(tl.where(enough, bins, BINS - 1), axis=0)
    last = tl.where(counted, last, tl.minimum(last + 1, BINS - 1))
    return last, tl.sum(tl.where(bins <= last, counts, 0), axis=0)


@triton.jit
def least_kept(highest, heat, min_p):
    """The threshold by min_p alone."""
    cut = tl.full((), float("-inf"), tl.float32)
    if min_p > 0.0:
        cut = tl.minimum(highest + heat * tl.log(min_p), highest)
    return cut


@triton.jit(do_not_specialize=["slots_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"])
def _limits_kernel(
    logits_ptr,  # [R, V]
    cuts_ptr,  # [R] out
    list_ptr,  # [R, SHORT] float32 scratch
    slots_ptr,  # [R]
    temperature_ptr,  # [S]
    top_k_ptr,  # [S]
    top_p_ptr,  # [S]
    min_p_ptr,  # [S]
    stride_logits,
    VOCAB: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST_BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    heat = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    counted = (top_k > 0) & (top_k < VOCAB)
    if (heat < GREEDY) | ((top_p >= 1.0) & (min_p <= 0.0) & (counted == 0)):
        tl.store(cuts_ptr + row, float("-inf"))
        return

    source = logits_ptr + row * stride_logits
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        maxima = tl.maximum(maxima, _load(source, start + tl.arange(0, BLOCK), VOCAB))
    highest = tl.max(maxima, axis=0)
    cut = least_kept(highest, heat, min_p)
    if ((top_p >= 1.0) & (counted == 0)) | (highest == float("-inf")):
        tl.store(cuts_ptr + row, cut)
        return

    # How many values lie in each step below the largest, and the probability of all that min_p keeps.
    per_heat = 1.0 / heat
    masses = tl.zeros([BLOCK], tl.float32)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        x = _load(source, start + tl.arange(0, BLOCK), VOCAB)
        masses += tl.where(x >= cut, tl.exp((x - highest) * per_heat), 0.0)
        counts += tl.histogram(bin_of(x, highest, per_heat), BINS)
    mass = tl.sum(masses, axis=0)
    last, listed = last_bin(counts, cut, counted, top_k, top_p, highest, per_heat)

    short = list_ptr + row * SHORT
    found = 0
    if (last < BINS - 1) & (listed <= SHORT):
        for start in range(0, VOCAB, BLOCK):
            x = _load(source, start + tl.arange(0, BLOCK), VOCAB)
            taken = bin_of(x, highest, per_heat) <= last
            place = found + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(short + place, x, mask=taken)
            found += tl.sum(taken.to(tl.int32), axis=0)
        tl.debug_barrier()  # other threads of the program read what these wrote
        if counted == 0:
            held = _mass(short, found, cut, highest, per_heat, LIST_BLOCK)
            found = tl.where(held >= top_p * mass, found, 0)
    if found > 0:
        cut = _cut(short, found, cut, counted, top_k, top_p, mass, highest, per_heat, LIST_BLOCK)
    else:
        cut = _cut(source, VOCAB, cut, counted, top_k, top_p, mass, highest, per_heat, BLOCK)
    tl.store(cuts_ptr + row, cut)


def sampling_cuts(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    greedy_below: float,
) -> torch.Tensor:
    """The smallest kept logit of each row, [R] float32 (-inf: all are kept). Arguments as in `sample`."""
    num_rows, vocab = logits.shape
    cuts = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    short_list = torch.empty((num_rows, SHORT_LIST), dtype=torch.float32, device=logits.device)
    _limits_kernel[(num_rows,)](
        logits, cuts, short_list, slots, temperature, top_k, top_p, min_p, logits.stride(0),
        VOCAB=vocab, SHORT=SHORT_LIST, BLOCK=BLOCK, LIST_BLOCK=LIST_BLOCK, GREEDY=greedy_below, num_warps=16,
    )  # fmt: skip
    return cuts
