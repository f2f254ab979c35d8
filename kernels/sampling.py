"""Choosing the next token of every row: greedy, or random with min_p, top_k and top_p, with reproducible noise."""

from __future__ import annotations

import math

import torch

from kernels.noise import exponential, gumbel_reference, row_keys, row_keys_reference, token_hash, token_hash_reference
from kernels.sampling_limits import sampling_cuts
from kernels.triton_import import next_power_of_2, tl, triton

GREEDY_BELOW = 1e-5  # temperatures below it mean greedy


def _thresholds_reference(
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


def sample_reference(
    logits: torch.Tensor,
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
    """One token id per row, [R] int32. logits [R, V] float32 (not modified); every other argument [R].

    Rows with temperature < 1e-5 take the largest logit (the lowest id among equals). Other rows take the largest of
    logits / temperature + Gumbel(seed, index, token) over the tokens kept by min_p (> 0), then top_k (> 0), then
    top_p (< 1); each keeps all tokens whose logit is at least the smallest it needs, so ties stay together. A row with
    such limits needs any_truncation, a row with a temperature any_random: without the flag they are ignored.
    """
    chosen = logits.argmax(1)
    if not any_random:
        return chosen.to(torch.int32)
    rows = (temperature >= GREEDY_BELOW).nonzero().squeeze(1)
    if rows.numel() == 0:
        return chosen.to(torch.int32)
    part, heat = logits[rows], temperature[rows]
    hashes = token_hash_reference(
        row_keys_reference(seeds[rows], indexes[rows]), torch.arange(logits.shape[1], device=logits.device)
    )
    scores = part / heat.unsqueeze(1) + gumbel_reference(hashes)
    if any_truncation:
        cut = _thresholds_reference(part, heat, top_k[rows], top_p[rows], min_p[rows])
        scores = scores.masked_fill(part < cut, -math.inf)
    chosen[rows] = scores.argmax(1)
    return chosen.to(torch.int32)


@triton.jit(do_not_specialize=["temperature_ptr", "seeds_ptr", "indexes_ptr"])
def _pick_kernel(
    logits_ptr,  # [R, V]
    best_ptr,  # [R, CHUNKS] out: the chunk's best score
    ids_ptr,  # [R, CHUNKS] out: its token
    cuts_ptr,  # [R] or None: tokens with a smaller logit are out
    temperature_ptr,  # [R]
    seeds_ptr,  # [R] int64
    indexes_ptr,  # [R]
    stride_logits,
    VOCAB: tl.constexpr,
    ANY_RANDOM: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * stride_logits + token, mask=token < VOCAB, other=float("-inf"))
    scores = tl.where(scores == scores, scores, float("-inf"))
    if ANY_RANDOM:
        heat = tl.load(temperature_ptr + row)
        if heat >= GREEDY:
            if cuts_ptr is not None:
                scores = tl.where(scores < tl.load(cuts_ptr + row), float("-inf"), scores)
            # The largest of logit / heat + Gumbel is that of exp(logit / heat) / exponential: one logarithm less.
            scaled = scores / heat
            peak = tl.max(scaled, axis=0)
            peak = tl.where(peak == float("-inf"), 0.0, peak)
            first, second = row_keys(tl.load(seeds_ptr + row), tl.load(indexes_ptr + row))
            scores = tl.exp(scaled - peak) / exponential(token_hash(first, second, token))
            best, place = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
            best = tl.where(best > 0, peak + tl.log(tl.maximum(best, 1e-37)), float("-inf"))
        else:
            best, place = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    else:
        best, place = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    part = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + part, best)
    tl.store(ids_ptr + part, chunk * BLOCK + place)


@triton.jit
def _best_chunk_kernel(
    best_ptr,  # [R, CHUNKS]
    ids_ptr,  # [R, CHUNKS]
    out_ptr,  # [R] int32
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    scores = tl.load(best_ptr + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    _best, place = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out_ptr + row, tl.load(ids_ptr + row * CHUNKS + place))


def sample(
    logits: torch.Tensor,
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
    """One token id per row, [R] int32, of logits [R, V] float32; see `sample_reference`."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert seeds.dtype == torch.int64
    for vector in (temperature, top_k, top_p, min_p, seeds, indexes):
        assert vector.shape == (num_rows,)
        assert vector.is_contiguous()
    out = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows == 0:
        return out
    cuts = None
    if any_random and any_truncation:
        cuts = sampling_cuts(logits, temperature, top_k, top_p, min_p, GREEDY_BELOW)
    block = 2048
    chunks = -(-vocab // block)
    best = torch.empty((num_rows, chunks), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, chunks), dtype=torch.int32, device=logits.device)
    _pick_kernel[(num_rows, chunks)](
        logits, best, ids, cuts, temperature, seeds, indexes, logits.stride(0),
        VOCAB=vocab, ANY_RANDOM=any_random, GREEDY=GREEDY_BELOW, BLOCK=block, num_warps=4,
    )  # fmt: skip
    _best_chunk_kernel[(num_rows,)](best, ids, out, CHUNKS=chunks, BLOCK=next_power_of_2(chunks), num_warps=1)
    return out
