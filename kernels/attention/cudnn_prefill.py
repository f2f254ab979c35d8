"""Prefill attention by torch's cuDNN kernel: for long prompts it is faster than ours, but it knows no pages.

New tokens attend to each other causally, to keys and values where the projections left them. All before them is copied
out of the pages and taken in large segments without a mask; the results are merged by their log-sum-exp. cuDNN builds a
plan for each new shape (35 to 60 ms, once per thread). So it gets the queries that fill pieces of the context, whose
sizes are few, and our kernel the rest. Prompts of one size go together, as one batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from pagebus.kernels.attention.gather import gather_tokens, merge_attention
from pagebus.kernels.common.target import target_of

PIECES = (512, 1024, 2048)
"""Sizes in tokens. What fills pieces of the first is best left to cuDNN; larger ones leave more to us, but have fewer
shapes."""
SEGMENTS = (65536, 32768, 16384, 8192, 4096, 2048, 1024, 512)
"""Sizes in which the past is taken, the largest that fits first; they bound the memory for copies."""
OWN_RATE, CAUSAL_RATE, PAST_RATE = 450e12, 640e12, 660e12
"""FLOP/s on an H200 of our prefill kernel, and of cuDNN's with a causal mask and without (see docs), for long rows."""
OWN_HALF, CAUSAL_HALF = 550, 400
"""Tokens of a row at which half of these rates is reached."""
BATCH_OVERHEAD_S, PAST_OVERHEAD_S = 40e-6, 20e-6
"""Of a batch, whose result may have to be copied, and of the copies of a past and the merge, per layer."""


class LongRow(NamedTuple):
    """A row, or a part of one, as the host knows it: ``num_queries`` tokens from ``first_token`` on, at the end of
    ``context_len``."""

    row: int
    first_token: int
    num_queries: int
    context_len: int
    own: bool = False
    """Whether our kernel for long prompts takes it (`attention_long`), and no library."""

    @property
    def past(self) -> int:
        """Tokens before its queries."""
        return self.context_len - self.num_queries

    @property
    def tokens(self) -> slice:
        """Its queries among those of the pass."""
        return slice(self.first_token, self.first_token + self.num_queries)

    def filled(self, piece: int) -> LongRow:
        """The part whose queries fill pieces of the context; perhaps of none."""
        end = self.context_len // piece * piece
        begin = min(-(-self.past // piece) * piece, end)
        return LongRow(self.row, self.first_token + begin - self.past, end - begin, end)


def supports(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN has a kernel for these, without a window: queries in half precision (a float8 cache's keys and
    values are widened as they are copied), head dim a multiple of 8 up to 128."""
    half = dtype in (torch.float16, torch.bfloat16) and (dtype == cache_dtype or cache_dtype.itemsize == 1)
    return half and head_dim % 8 == 0 and head_dim <= 128


def scratch_bytes(num_tokens: int, past: int, q_heads: int, kv_heads: int, head_dim: int, element_size: int) -> int:
    """The most that `long_prefill` takes for ``num_tokens`` new ones after ``past``, beside its result."""
    copies = 2 * kv_heads * max(num_tokens, min(past, SEGMENTS[0]))
    return (copies + 3 * q_heads * num_tokens) * head_dim * element_size + 12 * q_heads * num_tokens


Batch = tuple[LongRow, ...]
"""Rows without a past that are equally long and follow each other, or one row."""


once_per_step = lru_cache(maxsize=16)
"""For what every layer of a step asks again."""


@once_per_step
def batches(rows: tuple[LongRow, ...]) -> tuple[Batch, ...]:
    """Which rows go together."""
    found: list[Batch] = []
    for row in rows:
        before = found[-1][-1] if found else row
        follows = (row.row, row.tokens.start) == (before.row + 1, before.tokens.stop)
        if follows and row.past == before.past == 0 and row.num_queries == before.num_queries:
            found[-1] += (row,)
        else:
            found.append((row,))
    return tuple(found)


def filled_parts(rows: tuple[LongRow, ...], piece: int) -> tuple[LongRow, ...]:
    """All that fills pieces of the rows."""
    return tuple(part for row in rows if (part := row.filled(piece)).num_queries)


def faster_parts(rows: tuple[LongRow, ...], piece: int, q_heads: int, head_dim: int) -> tuple[LongRow, ...]:
    """What fills pieces of the rows and takes cuDNN less time than our kernel."""
    faster = (batch for batch in batches(filled_parts(rows, piece)) if gain_s(batch, q_heads, head_dim) > 0)
    return tuple(itertools.chain.from_iterable(faster))


@once_per_step
def takes_all(rows: tuple[LongRow, ...], num_tokens: int) -> bool:
    """Whether the rows are a single batch with all ``num_tokens`` of a pass."""
    return len(batches(rows)) == 1 and sum(row.num_queries for row in rows) == num_tokens


def gain_s(rows: Batch, q_heads: int, head_dim: int) -> float:
    """Seconds by which cuDNN takes less than our kernel for this batch, in one layer, by measured rates."""
    per_pair = 4 * q_heads * head_dim
    own = library = 0.0
    for row in rows:
        size = row.num_queries
        seen = 2 * row.context_len - size  # by a query, twice the mean: its length, of a prompt without past
        own += size * seen / 2 * per_pair / (OWN_RATE * seen / (seen + OWN_HALF))
        library += size**2 / 2 * per_pair / (CAUSAL_RATE * size / (size + CAUSAL_HALF))
        library += size * row.past * per_pair / PAST_RATE + (PAST_OVERHEAD_S if row.past else 0)
    return own - library - BATCH_OVERHEAD_S


class Problem(NamedTuple):
    """What cuDNN makes a plan for: ``queries`` of each of so many ``rows`` on ``keys``."""

    rows: int
    queries: int
    keys: int
    causal: bool


def problems(rows: tuple[LongRow, ...]) -> set[Problem]:
    """All of which the attention of ``rows`` consists."""
    found = set()
    for batch in batches(rows):
        size = batch[0].num_queries
        found.add(Problem(len(batch), size, size, causal=True))
        found.update(Problem(1, size, keys, causal=False) for keys in segments(batch[0].past))
    return found


def segments(past: int) -> list[int]:
    """The sizes in which a past is taken, one after another; together they are the past."""
    found: list[int] = []
    while (left := past - sum(found)) > 0:
        found.append(next(size for size in SEGMENTS if size <= left))
    return found


def batches_of_every_shape(most_queries: int, longest: int) -> list[Batch]:
    """Batches that between them have all shapes that parts of rows of together up to so many queries in contexts up to
    ``longest`` can have: those of large pieces first, and of these the likeliest, without a past those that fill a step
    before others, then behind whole chunks, behind others."""
    found: list[Batch] = []
    finest = PIECES[0]
    for size in range(min(most_queries, longest) // finest * finest, 0, -finest):
        for count in range(1, most_queries // size + 1):
            found.append(tuple(LongRow(i, i * size, size, size) for i in range(count)))
    found.sort(key=lambda batch: -sum(row.num_queries for row in batch))
    for past in sorted(SEGMENTS, key=lambda size: (size < most_queries, size)):
        for size in range(min(most_queries, longest - past) // finest * finest, 0, -finest):
            found.append((LongRow(0, 0, size, past + size),))
    return sorted(found, key=lambda batch: -_largest_piece(batch[0]))


def _largest_piece(row: LongRow) -> int:
    return max(piece for piece in PIECES if row.past % piece == row.num_queries % piece == 0)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, n, Hq, D], k and v [B, m, Hkv, D] -> attention [B, n, Hq, D] and its natural log-sum-exp [B, n, Hq]."""
    if q.is_meta or target_of(q.device) is None:
        return _attend_reference(q, k, v, scale, causal=causal)
    heads_first = (part.transpose(1, 2) for part in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.view(len(q), q.shape[2], q.shape[1]).transpose(1, 2)


def _attend_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[2] // k.shape[2]
    k, v = (part.float().repeat_interleave(group, 2) for part in (k, v))
    scores = torch.einsum("bnhd,bmhd->bnhm", q.float(), k) * scale
    if causal:
        hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    return torch.einsum("bnhm,bmhd->bnhd", scores.softmax(3), v).to(q.dtype), scores.logsumexp(3)


def long_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor | None,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    rows: Sequence[LongRow],
    kv_scales: torch.Tensor | None = None,
    projected: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of ``rows``, which are `LongRow.filled`, of q, written to ``out`` and returned; without ``out``, which
    rows that `takes_all` may leave to cuDNN, a new tensor. Argument shapes as in `paged_attention`. What is
    ``projected`` is copied out of the pages if a float8 cache holds it rounded, or without it."""
    rows = tuple(rows)
    assert out is not None or takes_all(rows, len(q))
    groups, projected = batches(rows), None if kv_scales is not None else projected
    longest = max(min(batch[0].past, SEGMENTS[0]) for batch in groups)
    if projected is None:
        longest = max(longest, *(len(batch) * batch[0].num_queries for batch in groups))
    shape = (2, longest, *k_cache.shape[2:])
    pages = _Pages(k_cache, v_cache, block_tables, kv_scales, torch.empty(shape, dtype=q.dtype, device=q.device))
    for batch in groups:
        result = _attend_batch(q, pages, out, slots, scale, batch, projected)
    return result if out is None else out


@dataclass(frozen=True, slots=True)
class _Pages:
    """What keys and values are copied from, and ``scratch`` [2, N, Hkv, D], where to."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_scales: torch.Tensor | None
    scratch: torch.Tensor

    def copied(self, slots: torch.Tensor, begin: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, size, Hkv, D] of so many positions of each slot from ``begin`` on, until the next."""
        k, v = self.scratch[:, : len(slots) * size].unbind()
        gather_tokens(self.k_cache, self.v_cache, slots, begin, k, v, self.block_tables, self.kv_scales)
        return k.unflatten(0, (len(slots), size)), v.unflatten(0, (len(slots), size))


def _attend_batch(
    q: torch.Tensor, pages: _Pages, out: torch.Tensor | None, slots: torch.Tensor, scale: float, rows: Batch,
    projected: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """Rows to themselves, then one with a past to that, merged segment by segment."""
    size, past = rows[0].num_queries, rows[0].past
    tokens, slots = slice(rows[0].tokens.start, rows[-1].tokens.stop), slots[rows[0].row : rows[-1].row + 1]
    queries = q[tokens].unflatten(0, (len(rows), size))
    if projected is None:
        k, v = pages.copied(slots, past, size)
    else:
        k, v = (part[tokens].unflatten(0, (len(rows), size)) for part in projected)
    result, lse = _attend(queries, k, v, scale, causal=True)
    result, lse, begin = result.flatten(0, 1), lse[0], 0
    for keys in segments(past):
        k, v = pages.copied(slots, begin, keys)
        more, more_lse = _attend(queries, k, v, scale, causal=False)
        begin += keys
        target = out[tokens] if out is not None and begin == past else None
        result, lse = merge_attention(result, lse, more[0], more_lse[0], target)
    return out[tokens].copy_(result) if out is not None and past == 0 else result
