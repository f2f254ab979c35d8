"""Prefill attention by torch's cuDNN kernel. It is faster than our prefill kernel for long prompts, but cannot read
pages.

New tokens attend to each other causally, on the keys and values that the projections have just written. The past is
copied out of the pages and attended to in large segments without a mask. The results are merged by their log-sum-exp.

cuDNN builds a plan for each new shape (35 to 60 ms, once per thread). It therefore gets only queries that fill pieces
of the context, which have few sizes; our kernel computes the rest. Prompts of the same size form one batch.
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
from pagebus.kernels.common.rates import CUDNN_CAUSAL, CUDNN_PAST, PREFILL_ALONE
from pagebus.kernels.common.target import target_of

PIECES = (512, 1024, 2048)
"""Sizes of pieces in tokens. Pieces of the first size leave most to cuDNN; larger ones leave more to our kernel, but
have fewer shapes."""
SEGMENTS = (65536, 32768, 16384, 8192, 4096, 2048, 1024, 512)
"""Sizes of the segments of a past, the largest that fits first. They bound the memory for copies."""
BATCH_OVERHEAD_S, PAST_OVERHEAD_S = 40e-6, 20e-6
"""Overhead per layer: of a batch, whose result may be copied; and of copying and merging a past."""


class LongRow(NamedTuple):
    """A row or a part of one, with lengths known on the host: ``num_queries`` tokens from ``first_token`` on, the last
    of ``context_len``."""

    row: int
    first_token: int
    num_queries: int
    context_len: int
    for_hopper: bool = False
    """Whether `hopper_attention` computes it; if not, `cudnn_attention` does."""

    @property
    def past(self) -> int:
        """Tokens before its queries."""
        return self.context_len - self.num_queries

    @property
    def tokens(self) -> slice:
        """Its queries among those of the pass."""
        return slice(self.first_token, self.first_token + self.num_queries)

    def filled(self, piece: int) -> LongRow:
        """The part whose queries fill whole pieces of the context; it may have no queries."""
        end = self.context_len // piece * piece
        begin = min(-(-self.past // piece) * piece, end)
        return LongRow(self.row, self.first_token + begin - self.past, end - begin, end)


def supports(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN has a kernel for these, without a window: queries in half precision (a float8 cache's keys and
    values are widened as they are copied), head dim a multiple of 8 up to 128."""
    half = dtype in (torch.float16, torch.bfloat16) and (dtype == cache_dtype or cache_dtype.itemsize == 1)
    return half and head_dim % 8 == 0 and head_dim <= 128


def scratch_bytes(num_tokens: int, past: int, q_heads: int, kv_heads: int, head_dim: int, element_size: int) -> int:
    """Upper bound of the bytes that `cudnn_attention` allocates for ``num_tokens`` new tokens after ``past``, without
    its result."""
    copies = 2 * kv_heads * max(num_tokens, min(past, SEGMENTS[0]))
    return (copies + 3 * q_heads * num_tokens) * head_dim * element_size + 12 * q_heads * num_tokens


Batch = tuple[LongRow, ...]
"""Rows without a past that are equally long and follow each other, or one row."""


once_per_step = lru_cache(maxsize=16)
"""Caches what every layer of a step would compute again."""


@once_per_step
def batches(rows: tuple[LongRow, ...]) -> tuple[Batch, ...]:
    """Group rows into batches."""
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
    """The parts of the rows that fill whole pieces."""
    return tuple(part for row in rows if (part := row.filled(piece)).num_queries)


def faster_parts(rows: tuple[LongRow, ...], piece: int, q_heads: int, head_dim: int) -> tuple[LongRow, ...]:
    """The parts of the rows that fill whole pieces and that cuDNN computes faster than our prefill kernel."""
    faster = (batch for batch in batches(filled_parts(rows, piece)) if gain_s(batch, q_heads, head_dim) > 0)
    return tuple(itertools.chain.from_iterable(faster))


@once_per_step
def takes_all(rows: tuple[LongRow, ...], num_tokens: int) -> bool:
    """Whether the rows are a single batch with all ``num_tokens`` of a pass."""
    return len(batches(rows)) == 1 and sum(row.num_queries for row in rows) == num_tokens


def gain_s(rows: Batch, q_heads: int, head_dim: int) -> float:
    """Seconds that cuDNN saves over our prefill kernel for this batch, in one layer, by measured rates."""
    per_pair = 4 * q_heads * head_dim
    prefill_s = cudnn_s = 0.0
    for row in rows:
        size = row.num_queries
        seen = 2 * row.context_len - size  # twice the mean number of keys per query; without a past, the row's length
        prefill_s += PREFILL_ALONE.seconds(size * seen / 2 * per_pair, seen)
        cudnn_s += CUDNN_CAUSAL.seconds(size**2 / 2 * per_pair, size)
        if row.past:
            cudnn_s += CUDNN_PAST.seconds(size * row.past * per_pair, row.past) + PAST_OVERHEAD_S
    return prefill_s - cudnn_s - BATCH_OVERHEAD_S


class Problem(NamedTuple):
    """A shape that cuDNN builds a plan for: ``rows`` rows of ``queries`` queries each on ``keys`` keys."""

    rows: int
    queries: int
    keys: int
    causal: bool


def problems(rows: tuple[LongRow, ...]) -> set[Problem]:
    """Every problem that the attention of ``rows`` consists of."""
    found = set()
    for batch in batches(rows):
        size = batch[0].num_queries
        found.add(Problem(len(batch), size, size, causal=True))
        found.update(Problem(1, size, keys, causal=False) for keys in segments(batch[0].past))
    return found


def segments(past: int) -> list[int]:
    """The sizes of consecutive segments of a past; their sum is ``past``."""
    found: list[int] = []
    while (left := past - sum(found)) > 0:
        found.append(next(size for size in SEGMENTS if size <= left))
    return found


def batches_of_every_shape(most_queries: int, longest: int) -> list[Batch]:
    """Batches that cover every shape of up to ``most_queries`` queries in contexts up to ``longest``.

    The order is that of preparation: large pieces first, and among them the likeliest. Those are batches without a past
    that fill a step, then smaller ones, then rows behind whole chunks, then rows behind any other past.
    """
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


def cudnn_attention(
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
    """Attention of ``rows``, each of them `LongRow.filled`, written to ``out`` and returned.

    ``out`` may be None if the rows are all of the pass (`takes_all`); the result is then a new tensor. Argument shapes
    are those of `paged_attention`. Keys and values of new tokens are read from ``projected``; without it, and with a
    float8 cache, which holds them rounded, they are copied out of the pages.
    """
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
    """The source of copied keys and values, and their destination, ``scratch`` [2, N, Hkv, D]."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_scales: torch.Tensor | None
    scratch: torch.Tensor

    def copied(self, slots: torch.Tensor, begin: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [B, size, Hkv, D] of ``size`` positions of each slot from ``begin`` on, valid until the next
        call."""
        k, v = self.scratch[:, : len(slots) * size].unbind()
        gather_tokens(self.k_cache, self.v_cache, slots, begin, k, v, self.block_tables, self.kv_scales)
        return k.unflatten(0, (len(slots), size)), v.unflatten(0, (len(slots), size))


def _attend_batch(
    q: torch.Tensor, pages: _Pages, out: torch.Tensor | None, slots: torch.Tensor, scale: float, rows: Batch,
    projected: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """Rows attend to their own tokens; a row with a past then attends to it segment by segment, and merges."""
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
