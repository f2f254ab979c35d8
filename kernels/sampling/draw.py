"""Draws a token in two levels, a chunk of the vocabulary and a token of it, where the logits at hand may be a range of
the vocabulary only. All here is the reference: plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from pagebus.kernels.sampling.noise import gumbel_reference, token_hash_reference

CHUNK = 1024  # tokens; it decides which noise a token gets, so changing it changes what a seed draws

Keys = tuple[torch.Tensor, torch.Tensor]
Scored = tuple[torch.Tensor, torch.Tensor]


def chunks_of(own: range) -> range:
    """The chunks in which the tokens ``own`` lie."""
    return range(own.start // CHUNK, -(-own.stop // CHUNK))


def chunked(scaled: torch.Tensor, start: int = 0) -> torch.Tensor:
    """scaled [R, W] of the tokens from ``start`` on, by chunk [R, C, CHUNK]; -inf for tokens of others."""
    before = start % CHUNK
    padded: torch.Tensor = F.pad(scaled, (before, -(before + scaled.shape[1]) % CHUNK), value=-math.inf)
    chunks: torch.Tensor = padded.unflatten(1, (-1, CHUNK))
    return chunks


def draw_chunk(sums: torch.Tensor, keys: Keys) -> torch.Tensor:
    """A chunk [R] int64, by the logs of the sums of exponentials of all chunks [R, C]."""
    numbers = torch.arange(sums.shape[1], device=sums.device)
    noise = gumbel_reference(token_hash_reference(keys[::-1], numbers))  # keys exchanged: other noise than the tokens'
    return (sums + noise).argmax(1)


def best_within(chunks: torch.Tensor, chunk: torch.Tensor, keys: Keys, first: int = 0) -> Scored:
    """The best token of ``chunk`` [R] in each row of ``chunks`` [R, C, CHUNK], the first of which is number ``first``:
    its score and its id [R] int64. The score is -inf where the chunk is not among these."""
    place = chunk - first
    missing = (place < 0) | (place >= chunks.shape[1])
    place = place.masked_fill(missing, 0)
    tokens = (place + first).unsqueeze(1) * CHUNK + torch.arange(CHUNK, device=chunks.device)
    scores = chunks[torch.arange(len(chunk), device=chunks.device), place]
    scores = scores + gumbel_reference(token_hash_reference(keys, tokens))
    best = scores.argmax(1, keepdim=True)
    found = scores.gather(1, best).squeeze(1).masked_fill(missing, -math.inf)
    return found, tokens.gather(1, best).squeeze(1)


def joined_sums(parts: list[tuple[range, torch.Tensor]], count: int) -> torch.Tensor:
    """The logs of the sums of ``count`` chunks [R, count], of those [R, C] of ranges of chunks, which may overlap in
    the ones at their ends."""
    rows = parts[0][1]
    total = rows.new_full((len(rows), count), -math.inf)
    for own, sums in parts:
        total[:, own.start : own.stop] = torch.logaddexp(total[:, own.start : own.stop], sums[:, : len(own)])
    return total
