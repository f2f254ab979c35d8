"""Sampling where each rank has the logits of a range of the vocabulary: what ranks tell each other, and what follows.

First come sums, or largest logits, of chunks: all ranks draw the same chunk from them. Then each tells its best
token of that chunk. As in :mod:`pagebus.kernels.sampling.sampling`, whose noise is the same; a chunk that lies on two
ranks has the sum of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.sampling.draw import CHUNK, best_within, chunked, chunks_of, draw_chunk, joined_sums
from pagebus.kernels.sampling.noise import exponential, row_keys, row_keys_reference, token_hash
from pagebus.kernels.sampling.sampling import GREEDY_BELOW, load_logits, score_chunks


@dataclass(frozen=True, slots=True)
class Part:
    """The range of a vocabulary of ``vocab`` tokens that ``rank`` has, one of ``world``: as `share` divides it."""

    rank: int
    world: int
    vocab: int

    def of(self, rank: int) -> range:
        """That of another rank."""
        return range(rank * self.vocab // self.world, (rank + 1) * self.vocab // self.world)

    @property
    def own(self) -> range:
        return self.of(self.rank)

    @property
    def most_chunks(self) -> int:
        """Of any rank."""
        return max(len(chunks_of(self.of(rank))) for rank in range(self.world))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What slots [S] want: ``temperature`` float32 and ``seeds`` int64; ``slots`` and ``indexes`` [R] are of the
    rows."""

    slots: torch.Tensor
    indexes: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


def chunk_scores_reference(
    logits: torch.Tensor, part: Part, wanted: Wanted, *, any_random: bool, cuts: torch.Tensor | None = None
) -> torch.Tensor:
    """logits [R, W] of the rank's tokens -> [R, most chunks of any rank] float32: of a random row the log of the sum of
    exponentials of each chunk, else its largest logit; -inf where the rank has no chunk. Of random rows smaller logits
    than ``cuts`` [R] are out."""
    heat = wanted.temperature[wanted.slots.long()]
    random = ((heat >= GREEDY_BELOW) & any_random).unsqueeze(1)
    wide = _kept(logits, cuts, random)
    scaled = chunked(torch.where(random, wide / heat.unsqueeze(1), wide), part.own.start)
    scores = torch.where(random, scaled.logsumexp(2), scaled.amax(2))
    return F.pad(scores, (0, part.most_chunks - scores.shape[1]), value=-math.inf)


def part_best_reference(
    logits: torch.Tensor, told: torch.Tensor, part: Part, wanted: Wanted, *, any_random: bool,
    cuts: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The chunk of each row by what all ranks ``told`` [N, R, C], and this rank's best token of it: [R, 2] int32, bits
    of its score, which is -inf if the rank has no token of the chunk, and its id. ``cuts`` as above."""
    heat = wanted.temperature[wanted.slots.long()]
    random = (heat >= GREEDY_BELOW) & any_random
    numbers = [chunks_of(part.of(rank)) for rank in range(part.world)]
    parts = list(zip(numbers, told, strict=True))
    largest = torch.full((len(logits), numbers[-1].stop), -math.inf, device=logits.device)
    for own, scores in parts:
        largest[:, own.start : own.stop] = torch.maximum(largest[:, own.start : own.stop], scores[:, : len(own)])
    keys = row_keys_reference(wanted.seeds[wanted.slots.long()], wanted.indexes)
    drawn = draw_chunk(joined_sums(parts, numbers[-1].stop), keys)
    chunk = torch.where(random, drawn, largest.argmax(1))
    wide = _kept(logits, cuts, random.unsqueeze(1))
    first = numbers[part.rank].start
    scores, ids = best_within(chunked(wide / heat.clamp(min=GREEDY_BELOW).unsqueeze(1), part.own.start), chunk, keys,
                              first)  # fmt: skip
    place = (chunk - first).clamp(0, len(numbers[part.rank]) - 1)
    plain = chunked(wide, part.own.start)[torch.arange(len(chunk), device=chunk.device), place]
    best = plain.max(1)
    missing = (chunk < first) | (chunk >= numbers[part.rank].stop)
    greedy = best.values.masked_fill(missing, -math.inf), chunk * CHUNK + best.indices
    scores, ids = torch.where(random, scores, greedy[0]), torch.where(random, ids, greedy[1])
    return torch.stack([scores.float().view(torch.int32), ids.int()], dim=1)


def _kept(logits: torch.Tensor, cuts: torch.Tensor | None, random: torch.Tensor) -> torch.Tensor:
    """In float32; -inf where there is no number, or in a ``random`` row [R, 1] a smaller one than the row's cut."""
    wide = logits.float().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    return wide if cuts is None else torch.where(random & (wide < cuts.unsqueeze(1)), -math.inf, wide)


def rank_best_reference(told: torch.Tensor) -> torch.Tensor:
    """The token [R] int32 with the best score of what all ranks ``told`` [N, R, 2], of equal ones the first rank's."""
    winners = told[:, :, 0].contiguous().view(torch.float32).argmax(0, keepdim=True)
    return told[:, :, 1].gather(0, winners).squeeze(0)


@triton.jit
def _joined(told_ptr, row, num_rows, chunk, random, VOCAB: tl.constexpr, RANKS: tl.constexpr, MOST: tl.constexpr,
            CHUNK: tl.constexpr):  # fmt: skip
    """Scores of the chunks of the whole vocabulary, from those of all ranks."""
    total = tl.full(chunk.shape, float("-inf"), tl.float32)
    for rank in tl.static_range(RANKS):
        place = chunk - (rank * VOCAB // RANKS) // CHUNK
        count = ((rank + 1) * VOCAB // RANKS + CHUNK - 1) // CHUNK - (rank * VOCAB // RANKS) // CHUNK
        source = told_ptr + (rank * num_rows + row) * MOST + place
        x = tl.load(source, mask=(place >= 0) & (place < count), other=float("-inf"))
        peak = tl.maximum(total, x)
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        less = tl.minimum(total, x)
        both = safe + tl.log(1.0 + tl.exp(less - safe))
        total = tl.where((less == float("-inf")) | (random == 0), peak, both)
    return total


@triton.jit(do_not_specialize=["slots_ptr", "temperature_ptr", "seeds_ptr", "indexes_ptr", "num_rows"])
def _part_best_kernel(
    logits_ptr,  # [R, W]
    told_ptr,  # [N, R, MOST]
    out_ptr,  # [R, 2] int32
    cuts_ptr,  # [R] or None: tokens with a smaller logit are out
    slots_ptr,  # [R]
    temperature_ptr,  # [S]
    seeds_ptr,  # [S] int64
    indexes_ptr,  # [R]
    stride_logits,
    num_rows,
    START: tl.constexpr,  # token of the first logit
    WIDTH: tl.constexpr,  # W
    VOCAB: tl.constexpr,
    RANKS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
    ANY_RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,  # chunks of the vocabulary, rounded up
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + row)
    heat = tl.load(temperature_ptr + slot)
    random = (heat >= GREEDY) & ANY_RANDOM
    first, second = row_keys(tl.load(seeds_ptr + slot), tl.load(indexes_ptr + row))
    scores = _joined(told_ptr, row, num_rows, chunk, random, VOCAB, RANKS, MOST, CHUNK)
    if random:
        scores -= tl.log(exponential(token_hash(second, first, chunk)))
    chosen = tl.argmax(scores, axis=0, tie_break_left=True)
    token = chosen * CHUNK + tl.arange(0, CHUNK)
    scores = load_logits(logits_ptr + row * stride_logits, token - START, cuts_ptr, row, random, WIDTH)
    if random:
        scores = scores * tl.div_rn(1.0, heat) - tl.log(exponential(token_hash(first, second, token)))
    place = tl.argmax(scores, axis=0, tie_break_left=True)
    tl.store(out_ptr + 2 * row, tl.max(scores, axis=0).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * row + 1, chosen * CHUNK + place)


@triton.jit(do_not_specialize=["stride_rank", "num_rows"])
def _rank_best_kernel(
    told_ptr,  # [N, R, 2] int32
    out_ptr,  # [R] int32
    stride_rank,
    num_rows,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    best = tl.load(told_ptr + 2 * row, mask=mask, other=0).to(tl.float32, bitcast=True)
    token = tl.load(told_ptr + 2 * row + 1, mask=mask, other=0)
    for rank in tl.static_range(1, RANKS):
        place = told_ptr + rank * stride_rank + 2 * row
        score = tl.load(place, mask=mask, other=0).to(tl.float32, bitcast=True)
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, tl.load(place + 1, mask=mask, other=0), token)
    tl.store(out_ptr + row, token, mask=mask)


def chunk_scores(
    logits: torch.Tensor, part: Part, wanted: Wanted, *, any_random: bool, cuts: torch.Tensor | None = None
) -> torch.Tensor:
    """As `chunk_scores_reference`, but where the rank has no chunk anything may be told: nobody reads it."""
    assert logits.stride(1) == 1
    scores = torch.empty((len(logits), part.most_chunks), dtype=torch.float32, device=logits.device)
    if len(logits):
        score_chunks(logits, scores, cuts, wanted.slots, wanted.temperature, part.own.start, any_random=any_random)
    return scores


def part_best(
    logits: torch.Tensor, told: torch.Tensor, part: Part, wanted: Wanted, *, any_random: bool,
    cuts: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `part_best_reference`."""
    assert logits.stride(1) == 1
    assert told.is_contiguous()
    out = torch.empty((len(logits), 2), dtype=torch.int32, device=logits.device)
    if not len(logits):
        return out
    _part_best_kernel[(len(logits),)](
        logits, told, out, cuts, wanted.slots, wanted.temperature, wanted.seeds, wanted.indexes, logits.stride(0),
        len(logits), START=part.own.start, WIDTH=len(part.own), VOCAB=part.vocab, RANKS=part.world,
        MOST=part.most_chunks, CHUNK=CHUNK, ANY_RANDOM=any_random, GREEDY=GREEDY_BELOW,
        BLOCK=next_power_of_2(-(-part.vocab // CHUNK)), **pdl(logits.device), num_warps=4,
    )  # fmt: skip
    return out


def rank_best(told: torch.Tensor) -> torch.Tensor:
    """As `rank_best_reference`, of ``told`` [N, R, 2] whose rows are contiguous."""
    num_ranks, num_rows, _ = told.shape
    assert told.stride()[1:] == (2, 1)
    out = torch.empty(num_rows, dtype=torch.int32, device=told.device)
    if num_rows:
        _rank_best_kernel[(-(-num_rows // 128),)](
            told, out, told.stride(0), num_rows, RANKS=num_ranks, ROWS=128, num_warps=4
        )
    return out
