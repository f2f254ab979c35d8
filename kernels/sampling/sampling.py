"""Chooses the next token of every row: greedy, or random with min_p, top_k and top_p, with reproducible noise.

A random token is drawn in two levels, so that a vocabulary costs one sum of exponentials per chunk and noise for one
chunk only. The largest of log(sum of exp) + Gumbel noise draws a chunk by its probability. Within it, the largest of
logit / temperature + Gumbel noise, with separate noise, draws a token by its probability. As with noise on every token,
small changes of the logits rarely change the token.
"""

from __future__ import annotations

import math

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import constant, next_power_of_2, tl, triton
from pagebus.kernels.sampling.draw import CHUNK, best_within, chunked, draw_chunk
from pagebus.kernels.sampling.limits import sampling_cuts
from pagebus.kernels.sampling.logprobs import without_nan
from pagebus.kernels.sampling.noise import exponential, row_keys, row_keys_reference, token_hash

GREEDY_BELOW = 1e-5  # temperatures below it mean greedy
CHUNKS_PER_PROGRAM = 2  # by one warp, which need not wait for others
MOST_ROWS = 32768  # of one launch: the second dimension of a grid has room for 65,535
LOG2_E = constant(1.4426950408889634)


def thresholds_reference(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The smallest kept logit of each row, [R, 1]: a token is kept exactly when its logit is >= it (ties stay)."""
    vocab = logits.shape[1]
    limited = (top_k > 0) & (top_k < vocab)
    most = int(top_k.max()) if bool(limited.all()) else vocab
    ordered = logits.topk(most, dim=1).values if most < vocab else logits.sort(dim=1, descending=True).values
    highest = ordered[:, :1]
    temperature = temperature.unsqueeze(1)
    min_p_cut = highest + temperature * torch.log(min_p.clamp(min=0).unsqueeze(1))  # log 0 = -inf keeps all
    last = torch.where(limited, top_k, most).long().unsqueeze(1) - 1
    top_k_cut = torch.where(limited.unsqueeze(1), ordered.gather(1, last), -math.inf)
    cut = torch.maximum(min_p_cut.minimum(highest), top_k_cut)
    kept_mass = torch.where(ordered >= cut, torch.exp((ordered - highest) / temperature), 0.0)
    mass = kept_mass.cumsum(1)
    # Ties of the k-th value that topk left out of `ordered` are kept, so they count in the total.
    missing = (logits >= cut).sum(1, keepdim=True) - (ordered >= cut).sum(1, keepdim=True)
    total = mass[:, -1:] + missing * torch.exp((cut - highest) / temperature)
    # The tokens before position i (in descending order) hold mass[i] - kept_mass[i]: i is needed while < top_p.
    needed = (mass - kept_mass) < top_p.unsqueeze(1) * total
    final = (needed & (ordered >= cut)).sum(1, keepdim=True).clamp(min=1) - 1
    top_p_cut = torch.where((top_p < 1).unsqueeze(1), ordered.gather(1, final), -math.inf)
    return torch.maximum(cut, top_p_cut)


def largest_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, V], in which NaN is -inf, and the id [R] of the largest of each row."""
    largest = logits.argmax(1)
    if bool(logits.gather(1, largest.unsqueeze(1)).isnan().any()):  # of a row with a NaN it is that
        logits = without_nan(logits)
        largest = logits.argmax(1)
    return logits, largest


def sample_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    indexes: torch.Tensor,
    *,
    any_random: bool,
    any_truncation: bool,
) -> torch.Tensor:
    """One token id per row, [R] int32. logits [R, V] (not modified, taken in float32), slots and indexes [R]; the other
    arguments [S] hold what the rows' slots want.

    Rows with temperature < 1e-5 take the largest logit (the lowest id among equals). Other rows draw by the softmax of
    logits / temperature over the tokens kept by min_p (> 0), then top_k (> 0), then top_p (< 1); each keeps all tokens
    whose logit is at least the smallest it needs, so ties stay together. The noise is a function of seed and index, see
    `_draw_reference`. A row with such limits needs any_truncation, a row with a temperature any_random: without the
    flag they are ignored. NaN counts as -inf.
    """
    logits, chosen = largest_reference(logits)
    if not any_random:
        return chosen.to(torch.int32)
    rows = (temperature[slots] >= GREEDY_BELOW).nonzero().squeeze(1)
    if rows.numel() == 0:
        return chosen.to(torch.int32)
    mine = slots[rows]
    part, heat = logits[rows].float(), temperature[mine]
    scaled = part * heat.reciprocal().unsqueeze(1)
    if any_truncation:
        cut = thresholds_reference(part, heat, top_k[mine], top_p[mine], min_p[mine])
        scaled.masked_fill_(part < cut, -math.inf)
    chosen[rows] = _draw_reference(scaled, row_keys_reference(seeds[mine], indexes[rows]))
    return chosen.to(torch.int32)


def _draw_reference(scaled: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A token id per row of scaled [R, V], drawn by its softmax with the noise of the rows' keys: [R] int64."""
    chunks = chunked(scaled)
    return best_within(chunks, draw_chunk(chunks.logsumexp(2), keys), keys)[1]


@triton.jit
def load_logits(logits, token, cuts_ptr, row, random, VOCAB: tl.constexpr):
    """Logits of one row; what is NaN, not in [0, VOCAB) or (in a random row) cut is -inf."""
    x = tl.load(logits + token, mask=(token >= 0) & (token < VOCAB), other=float("-inf")).to(tl.float32)
    x = tl.maximum(x, float("-inf"))  # of a NaN and a number, the number
    if cuts_ptr is not None:  # noqa: SIM102 - known when compiled, unlike the next
        if random:
            x = tl.where(x < tl.load(cuts_ptr + row), float("-inf"), x)
    return x


@triton.jit(do_not_specialize=["slots_ptr", "temperature_ptr"])
def _chunk_kernel(
    logits_ptr,  # [R, V]
    chunk_scores_ptr,  # [R, CHUNKS] float32 out: log(sum of exp) of a random row's chunk, else its largest logit
    cuts_ptr,  # [R] or None: tokens with a smaller logit are out
    slots_ptr,  # [R]
    temperature_ptr,  # [S]
    stride_logits,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BEFORE: tl.constexpr,  # tokens of the first chunk that come before the first logit
    ANY_RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    PART: tl.constexpr,  # chunks of a program
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0) * PART + tl.arange(0, PART)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :] - BEFORE
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    heat = tl.load(temperature_ptr + tl.load(slots_ptr + row))
    random = (heat >= GREEDY) & ANY_RANDOM
    x = load_logits(logits_ptr + row * stride_logits, token, cuts_ptr, row, random, VOCAB)
    largest = tl.max(x, axis=1)
    if random:
        per_heat = tl.div_rn(LOG2_E, heat)
        peak = tl.where(largest == float("-inf"), 0.0, largest * per_heat)
        total = tl.sum(tl.exp2(x * per_heat - peak[:, None]), axis=1)
        largest = tl.where(total > 0, (peak + tl.log2(tl.maximum(total, 1e-30))) / LOG2_E, float("-inf"))
    tl.store(chunk_scores_ptr + row * CHUNKS + chunk, largest, mask=chunk < CHUNKS)


def score_chunks(
    logits: torch.Tensor, scores: torch.Tensor, cuts: torch.Tensor | None, slots: torch.Tensor,
    temperature: torch.Tensor, first: int, *, any_random: bool,
) -> None:  # fmt: skip
    """Write the ``scores`` [R, C] of the chunks of logits [R, W], which are those of the tokens from ``first`` on."""
    num_rows, width = logits.shape
    if num_rows > MOST_ROWS:
        for begin in range(0, num_rows, MOST_ROWS):
            part = slice(begin, begin + MOST_ROWS)
            mine = logits[part], scores[part], None if cuts is None else cuts[part], slots[part]
            score_chunks(*mine, temperature, first, any_random=any_random)
        return
    before = first % CHUNK
    _chunk_kernel[(-(-(before + width) // (CHUNK * CHUNKS_PER_PROGRAM)), num_rows)](
        logits, scores, cuts, slots, temperature, logits.stride(0), VOCAB=width, CHUNKS=scores.shape[1], CHUNK=CHUNK,
        BEFORE=before, ANY_RANDOM=any_random, GREEDY=GREEDY_BELOW, PART=CHUNKS_PER_PROGRAM, **pdl(logits.device),
        num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["slots_ptr", "temperature_ptr", "seeds_ptr", "indexes_ptr"])
def _pick_kernel(
    logits_ptr,  # [R, V]
    chunk_scores_ptr,  # [R, CHUNKS]
    out_ptr,  # [R] int32
    cuts_ptr,  # [R] or None
    slots_ptr,  # [R]
    temperature_ptr,  # [S]
    seeds_ptr,  # [S] int64
    indexes_ptr,  # [R]
    stride_logits,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    ANY_RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,  # CHUNKS rounded up
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
    scores = tl.load(chunk_scores_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    if random:
        scores -= tl.log(exponential(token_hash(second, first, chunk)))
    chosen = tl.argmax(scores, axis=0, tie_break_left=True)
    token = chosen * CHUNK + tl.arange(0, CHUNK)
    scores = load_logits(logits_ptr + row * stride_logits, token, cuts_ptr, row, random, VOCAB)
    if random:
        scores = scores * tl.div_rn(1.0, heat) - tl.log(exponential(token_hash(first, second, token)))
    place = tl.argmax(scores, axis=0, tie_break_left=True)
    tl.store(out_ptr + row, chosen * CHUNK + place)


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    indexes: torch.Tensor,
    *,
    any_random: bool,
    any_truncation: bool,
) -> torch.Tensor:
    """One token id per row, [R] int32, of logits [R, V], float32 if any_truncation; see `sample_reference`."""
    num_rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert seeds.dtype == torch.int64
    assert slots.shape == indexes.shape == (num_rows,)
    assert slots.is_contiguous()
    assert indexes.is_contiguous()
    for vector in (temperature, top_k, top_p, min_p, seeds):
        assert vector.dim() == 1
        assert vector.is_contiguous()
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    cuts = None
    if any_random and any_truncation:
        assert logits.dtype == torch.float32
        cuts = sampling_cuts(logits, slots, temperature, top_k, top_p, min_p, GREEDY_BELOW)
    chunks = -(-vocab // CHUNK)
    chunk_scores = torch.empty((num_rows, chunks), dtype=torch.float32, device=logits.device)
    score_chunks(logits, chunk_scores, cuts, slots, temperature, 0, any_random=any_random)
    _pick_kernel[(num_rows,)](
        logits, chunk_scores, out, cuts, slots, temperature, seeds, indexes, logits.stride(0),
        VOCAB=vocab, CHUNKS=chunks, CHUNK=CHUNK, ANY_RANDOM=any_random, GREEDY=GREEDY_BELOW,
        BLOCK=next_power_of_2(chunks), **pdl(logits.device), num_warps=4,
    )  # fmt: skip
    return out
