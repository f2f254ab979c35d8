"""Prefill attention by torch's cuDNN kernel: for long prompts it is faster than ours, but it knows no pages.

The last tokens of a row, its new ones among them, are copied out of the pages and attended causally; all before them is
taken in large segments without a mask; the results are merged by their log-sum-exp. Sizes are multiples of
:data:`PIECE`, because cuDNN builds a plan for each new shape (about 40 ms, once per process): where the new tokens do
not begin at a multiple, some old ones are queried again, and their results dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.attention_gather import gather_tokens, merge_attention
from kernels.target import target_of

PIECE = 2048
SEGMENTS = (65536, 32768, 16384, 8192, 4096, 2048)
"""Sizes in which the past is taken, the largest that fits first; they bound the memory for copies."""
MATMUL_RATES = {"own": 400e12, "causal": 560e12, "past": 660e12}
"""FLOP/s on an H200: of our prefill kernel, of cuDNN's with a causal mask (8192 tokens) and without (see docs)."""
OVERHEAD_S = 60e-6
"""Of the copies and the merge, per row and layer."""


@dataclass(frozen=True, slots=True)
class LongRow:
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
    copies = 2 * kv_heads * max(row.square, min(row.past, SEGMENTS[0]))
    return (copies + 4 * q_heads * row.square) * head_dim * element_size + 12 * q_heads * row.square


def is_faster(rows: Sequence[LongRow], q_heads: int, head_dim: int) -> bool:
    """Whether cuDNN takes less time for these rows than our kernel, by measured rates."""
    per_pair = 4 * q_heads * head_dim
    own = library = 0.0
    for row in rows:
        own += row.num_queries * (row.context_len - row.num_queries / 2) * per_pair / MATMUL_RATES["own"]
        library += row.square**2 / 2 * per_pair / MATMUL_RATES["causal"]
        library += row.square * row.past * per_pair / MATMUL_RATES["past"] + OVERHEAD_S
    return library < own


def rows_of_every_shape(most_queries: int, longest: int) -> list[LongRow]:
    """Rows that between them have all shapes that rows of up to so many queries in contexts up to ``longest`` can have,
    the likeliest first: behind whole chunks, then behind others. A square has two: queries that fill it are taken as
    they lie, others are copied."""
    rows = []
    for past in (0, *sorted(SEGMENTS, key=lambda size: (size < most_queries, size))):
        most = min(most_queries + PIECE - 1, longest - past)
        for square in range(-(-most // PIECE) * PIECE, 0, -PIECE):
            filled = min(square - 1, most)
            if square <= min(most, most_queries):
                rows.append(LongRow(0, 0, square, past + square))
            if filled > square - PIECE:
                rows.append(LongRow(0, 0, min(filled, most_queries), past + filled))
    return rows


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], k and v [m, Hkv, D] -> attention [n, Hq, D] and its natural log-sum-exp [n, Hq]."""
    if q.is_meta or target_of(q.device) is None:
        return _attend_reference(q, k, v, scale, causal=causal)
    heads_first = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse.view(q.shape[1], q.shape[0]).t()


def _attend_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("nhd,mhd->nhm", q.float(), k) * scale
    if causal:
        hidden = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    return torch.einsum("nhm,mhd->nhd", scores.softmax(2), v).to(q.dtype), scores.logsumexp(2)


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
    """Attention of ``rows`` of q, written to ``out`` and returned; without ``out``, which one row that has all tokens
    may leave to cuDNN, a new tensor. Argument shapes as in `paged_attention`."""
    assert out is not None or len(rows) == 1
    longest = max(max(row.square, min(row.past, SEGMENTS[0])) for row in rows)
    shape = (2, longest, *k_cache.shape[2:])
    scratch = torch.empty(shape, dtype=q.dtype, device=q.device)
    pages = _Pages(k_cache, v_cache, block_tables, kv_scales, scratch)
    for row in rows:
        mine = slice(row.first_token, row.first_token + row.num_queries)
        target = None if out is None else out[mine]
        result = _long_row(q[mine], pages, target, slots[row.row :][:1], scale, row)
    return result if out is None else out


@dataclass(frozen=True, slots=True)
class _Pages:
    """What keys and values are copied from, and ``scratch`` [2, N, Hkv, D], where to."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    kv_scales: torch.Tensor | None
    scratch: torch.Tensor

    def copy(self, slot: torch.Tensor, begin: int, end: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the positions begin..end of one slot [size, Hkv, D], zeros after them."""
        k, v = self.scratch[0, :size], self.scratch[1, :size]
        count = end - begin
        if count < size:
            self.scratch[:, count:size].zero_()  # hidden, but garbage may be NaN, and NaN times 0 is NaN
        gather_tokens(
            self.k_cache, self.v_cache, slot, begin, k[:count], v[:count], self.block_tables, self.kv_scales
        )  # fmt: skip
        return k, v


def _long_row(
    q: torch.Tensor, pages: _Pages, out: torch.Tensor | None, slot: torch.Tensor, scale: float, row: LongRow
) -> torch.Tensor:
    count, mine = row.num_queries, slice(row.repeated, row.repeated + row.num_queries)
    queries = q
    if row.square != count:
        queries = q.new_zeros((row.square, *q.shape[1:]))
        queries[mine] = q
    k, v = pages.copy(slot, row.past, row.context_len, row.square)
    result, lse = _attend(queries, k, v, scale, causal=True)
    result, lse = result[mine], lse[mine]
    begin = 0
    while begin < row.past:
        size = next(size for size in SEGMENTS if size <= row.past - begin)
        k, v = pages.copy(slot, begin, begin + size, size)
        more, more_lse = _attend(queries, k, v, scale, causal=False)
        begin += size
        target = out if begin == row.past else None
        result, lse = merge_attention(result, lse, more[mine], more_lse[mine], target)
    if out is not None and not row.past:
        out.copy_(result)
    return result
