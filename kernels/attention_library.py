"""Prefill attention by torch's cuDNN kernel: for long prompts it is faster than ours, but it knows no pages.

The last tokens of a row, its new ones among them, are copied out of the pages and attended causally; all before them is
taken in large segments without a mask; the results are merged by their log-sum-exp. Sizes are multiples of
:data:`PIECE`, because cuDNN builds a plan for each new shape (about 60 ms, once per thread): where the new tokens do
not begin at a multiple, some old ones are queried again, and their results dropped. Prompts of one size go together,
as one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from kernels.attention_gather import gather_tokens, merge_attention
from kernels.target import target_of

PIECE = 2048
SEGMENTS = (65536, 32768, 16384, 8192, 4096, 2048)
"""Sizes in which the past is taken, the largest that fits first; they bound the memory for copies."""
FULL = 0.75
"""The share of its square that a row's queries must fill to go together with others, so that little is padded."""
OWN_RATE, CAUSAL_RATE, PAST_RATE = 450e12, 640e12, 660e12
"""FLOP/s on an H200 of our prefill kernel, and of cuDNN's with a causal mask and without (see docs), for long rows."""
OWN_HALF, CAUSAL_HALF = 550, 400
"""Tokens of a row at which half of these rates is reached."""
BATCH_OVERHEAD_S, PAST_OVERHEAD_S = 40e-6, 20e-6
"""Of the copies of a batch, and of those of a past and the merge, per layer."""


class LongRow(NamedTuple):
    """One row as the host knows it: ``num_queries`` tokens from ``first_token`` on, at the end of ``context_len``."""

    row: int
    first_token: int
    num_queries: int
    context_len: int

    @property
    def repeated(self) -> int:
        """Old tokens that are queried again, so that those before them fill whole pieces."""
        return (self.context_len - self.num_queries) % PIECE

    @property
    def square(self) -> int:
        """Tokens of the causal part, padded."""
        return -(-(self.repeated + self.num_queries) // PIECE) * PIECE

    @property
    def tokens(self) -> slice:
        """Its new tokens among those of the pass."""
        return slice(self.first_token, self.first_token + self.num_queries)

    @property
    def placed(self) -> slice:
        """Its new tokens in the square."""
        return slice(self.repeated, self.repeated + self.num_queries)

    @property
    def past(self) -> int:
        """Tokens before the causal part, a multiple of PIECE."""
        return self.context_len - self.num_queries - self.repeated


def supports(q: torch.Tensor, k_cache: torch.Tensor, sliding_window: int) -> bool:
    """Whether cuDNN has a kernel for these: queries in half precision (a float8 cache's keys and values are widened as
    they are copied), head dim a multiple of 8 up to 128, no window."""
    head_dim = q.shape[2]
    half = q.dtype in (torch.float16, torch.bfloat16) and (q.dtype == k_cache.dtype or k_cache.element_size() == 1)
    return half and sliding_window == 0 and head_dim % 8 == 0 and head_dim <= 128


def scratch_bytes(num_tokens: int, past: int, q_heads: int, kv_heads: int, head_dim: int, element_size: int) -> int:
    """The most that `long_prefill` takes for ``num_tokens`` new ones after ``past``, beside its result."""
    row = LongRow(0, 0, num_tokens, num_tokens + past)
    batch = math.ceil(num_tokens / FULL)
    copies = 2 * kv_heads * max(row.square, batch, min(row.past, SEGMENTS[0]))
    return (copies + 4 * q_heads * row.square) * head_dim * element_size + 12 * q_heads * row.square


Batch = tuple[LongRow, ...]
"""Rows without a past whose squares are alike, or one row."""


once_per_step = lru_cache(maxsize=16)
"""For what every layer of a step asks again."""


@once_per_step
def batches(rows: tuple[LongRow, ...]) -> tuple[Batch, ...]:
    """Which rows go together."""
    alike: dict[int, list[LongRow]] = {}
    others: list[Batch] = []
    for row in rows:
        if row.past == 0 and row.num_queries >= FULL * row.square:
            alike.setdefault(row.square, []).append(row)
        else:
            others.append((row,))
    return (*map(tuple, alike.values()), *others)


@once_per_step
def takes_all(rows: tuple[LongRow, ...], num_tokens: int) -> bool:
    """Whether the rows are a single batch whose result, as it lies, is that of all ``num_tokens`` of a pass."""
    if len(rows) == 1:
        return rows[0].num_queries == num_tokens
    return len(batches(rows)) == 1 and _is_filled(rows) and len(rows) * rows[0].square == num_tokens


@once_per_step
def is_faster(rows: tuple[LongRow, ...], q_heads: int, head_dim: int) -> bool:
    """Whether cuDNN takes less time for these rows than our kernel."""
    return gain_s(rows, q_heads, head_dim) > 0


def gain_s(rows: tuple[LongRow, ...], q_heads: int, head_dim: int) -> float:
    """Seconds by which cuDNN takes less than our kernel for these rows, in one layer, by measured rates."""
    per_pair = 4 * q_heads * head_dim
    own = library = 0.0
    for row in rows:
        seen = 2 * row.context_len - row.num_queries  # by a query, twice the mean: its length, of a prompt without past
        own += row.num_queries * seen / 2 * per_pair / (OWN_RATE * seen / (seen + OWN_HALF))
        causal_rate = CAUSAL_RATE * row.square / (row.square + CAUSAL_HALF)
        library += row.square**2 / 2 * per_pair / causal_rate
        library += row.square * row.past * per_pair / PAST_RATE + (PAST_OVERHEAD_S if row.past else 0)
    return own - library - len(batches(rows)) * BATCH_OVERHEAD_S


@dataclass(frozen=True, slots=True)
class Problem:
    """What cuDNN makes a plan for: ``queries`` of each of ``count`` rows on ``keys``. Those that are ``filled`` lie
    between keys and values, others are copies."""

    count: int
    queries: int
    keys: int
    filled: bool
    causal: bool


def problems(rows: tuple[LongRow, ...]) -> set[Problem]:
    """All of which the attention of ``rows`` consists."""
    found = set()
    for group in batches(rows):
        size, filled = group[0].square, _is_filled(group)
        found.add(Problem(len(group), size, size, filled, causal=True))
        found.update(Problem(1, size, keys, filled, causal=False) for keys in segments(group[0].past))
    return found


def segments(past: int) -> list[int]:
    """The sizes in which a past is taken, one after another; together they are the past."""
    found: list[int] = []
    while (left := past - sum(found)) > 0:
        found.append(next(size for size in SEGMENTS if size <= left))
    return found


def batches_of_every_shape(most_queries: int, longest: int) -> list[Batch]:
    """Batches that between them have all shapes that rows of together up to so many queries in contexts up to
    ``longest`` can have, the likeliest first: behind whole chunks, then behind others, then several at once. A square
    has two: queries that fill it are taken as they lie, others are copied."""
    found: list[Batch] = []
    for past in (0, *sorted(SEGMENTS, key=lambda size: (size < most_queries, size))):
        most = min(most_queries + PIECE - 1, longest - past)
        for square in range(-(-most // PIECE) * PIECE, 0, -PIECE):
            filled = min(square - 1, most)
            if square <= min(most, most_queries):
                found.append((LongRow(0, 0, square, past + square),))
            if filled > square - PIECE:
                found.append((LongRow(0, 0, min(filled, most_queries), past + filled),))
    for square in range(PIECE, min(most_queries, longest) + 1, PIECE):
        for queries in (square, math.ceil(FULL * square)):
            for count in range(2, most_queries // queries + 1):
                found.append(tuple(LongRow(i, i * queries, queries, queries) for i in range(count)))
    return found


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
) -> torch.Tensor:
    """Attention of ``rows`` of q, written to ``out`` and returned; without ``out``, which rows that `takes_all` may
    leave to cuDNN, a new tensor. Argument shapes as in `paged_attention`."""
    rows = tuple(rows)
    assert out is not None or takes_all(rows, len(q))
    groups = batches(rows)
    longest = max(max(len(group) * group[0].square, min(group[0].past, SEGMENTS[0])) for group in groups)
    shape = (2, longest, *k_cache.shape[2:])
    pages = _Pages(k_cache, v_cache, block_tables, kv_scales, torch.empty(shape, dtype=q.dtype, device=q.device))
    for group in groups:
        if group[0].past:
            result = _long_row(q, pages, out, slots, scale, group[0])
        else:
            result = _batch(q, pages, out, slots, scale, group)
    return result if out is None else out


@dataclass(frozen=True, slots=True)
class _Pages:
    """What keys and values are copied from, and ``scratch`` [2, N, Hkv, D], where to."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_scales: torch.Tensor | None
    scratch: torch.Tensor

    def copy(self, slots: torch.Tensor, begin: int, end: int, size: int, first: int = 0) -> None:
        """Keys and values of the positions begin..end of each slot, zeros after them: ``size`` of each, from ``first``
        on."""
        k, v = self.scratch[:, first : first + len(slots) * size].unbind()
        count = end - begin
        if count < size:  # of one slot
            self.scratch[:, first + count : first + size].zero_()  # hidden, but it may be NaN, and NaN times 0 is NaN
            k, v = k[:count], v[:count]
        gather_tokens(self.k_cache, self.v_cache, slots, begin, k, v, self.block_tables, self.kv_scales)

    def taken(self, count: int, size: int) -> tuple[torch.Tensor, ...]:
        """Keys and values [count, size, Hkv, D] as they were copied."""
        return self.scratch[:, : count * size].unflatten(1, (count, size)).unbind()


@once_per_step
def _is_filled(rows: tuple[LongRow, ...]) -> bool:
    """Whether the rows' queries, as they lie in the pass, are their squares one behind the other."""
    size, first = rows[0].square, rows[0].first_token
    return all(row.num_queries == size and row.first_token == first + i * size for i, row in enumerate(rows))


def _squares(q: torch.Tensor, rows: Batch) -> torch.Tensor:
    """The rows' queries [B, square, Hq, D]."""
    size = rows[0].square
    if _is_filled(rows):
        first = rows[0].first_token
        return q[first : first + len(rows) * size].unflatten(0, (len(rows), size))
    queries = q.new_zeros((len(rows), size, *q.shape[1:]))
    for row, of_row in zip(rows, queries, strict=True):
        of_row[row.placed] = q[row.tokens]
    return queries


def _attend_squares(
    queries: torch.Tensor, pages: _Pages, slots: torch.Tensor, scale: float, rows: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the rows' squares to themselves [B, square, Hq, D]; what is no new token of a row means nothing."""
    size, first = rows[0].square, rows[0].row
    if _is_filled(rows) and rows[-1].row - first == len(rows) - 1:
        pages.copy(slots[first : first + len(rows)], rows[0].past, rows[0].past + size, size)
    else:
        for i, row in enumerate(rows):
            pages.copy(slots[row.row :][:1], row.past, row.context_len, size, i * size)
    return _attend(queries, *pages.taken(len(rows), size), scale, causal=True)


def _batch(
    q: torch.Tensor, pages: _Pages, out: torch.Tensor | None, slots: torch.Tensor, scale: float, rows: Batch
) -> torch.Tensor:
    """Rows without a past."""
    result = _attend_squares(_squares(q, rows), pages, slots, scale, rows)[0]
    if _is_filled(rows):
        result, first = result.flatten(0, 1), rows[0].first_token
        return result if out is None else out[first : first + len(result)].copy_(result)
    if out is None:
        return result[0, rows[0].placed]
    for row, of_row in zip(rows, result, strict=True):
        out[row.tokens] = of_row[row.placed]
    return out


def _long_row(
    q: torch.Tensor, pages: _Pages, out: torch.Tensor | None, slots: torch.Tensor, scale: float, row: LongRow
) -> torch.Tensor:
    """A row with a past, which is merged segment by segment."""
    queries = _squares(q, (row,))
    result, lse = (part[0, row.placed] for part in _attend_squares(queries, pages, slots, scale, (row,)))
    begin = 0
    for size in segments(row.past):
        pages.copy(slots[row.row :][:1], begin, begin + size, size)
        more, more_lse = _attend(queries, *pages.taken(1, size), scale, causal=False)
        begin += size
        target = out[row.tokens] if out is not None and begin == row.past else None
        result, lse = merge_attention(result, lse, more[0, row.placed], more_lse[0, row.placed], target)
    return result
