"""Paged attention in plain torch: the definition, and the executor's path on a CPU.

Rows are batched, never looped over: decode rows in one padded batch, prefill rows in one batch per power of two of
their lengths, so that padding at most doubles each length.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagebus.kernels.common.int8 import from_int8_reference
from pagebus.kernels.common.reach import first_seen_reference

Caches = tuple[tuple[int, torch.Tensor, torch.Tensor | None], ...]
"""Keys and values: 0 or 1, the pages, and their scales if they have any."""


class Scores(NamedTuple):
    """What becomes of scores: capped with ``softcap`` (0: they are not), and beside them ``sinks`` [Hq], if any."""

    softcap: float
    sinks: torch.Tensor | None

    @property
    def changed(self) -> bool:
        return self.softcap != 0 or self.sinks is not None

    def by_group(self, heads: int) -> torch.Tensor | None:
        """The sinks of this many ``heads``, or groups of heads: [heads, Hq / heads]."""
        return None if self.sinks is None else self.sinks.view(heads, -1)


def _gather(
    part: int,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    table: torch.Tensor,
    lens: torch.Tensor,
    length: int,
    dtype: torch.dtype,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cached tokens of some rows (part 0: keys, 1: values), finite past a row's end: table [R, MB], lens [R] >= 1
    -> [R, Hkv, length, D]. The rows' queries see nothing before the places ``seen`` [R], if given.

    A float8 cache is multiplied with its scales [Hkv], in float32, one in int8 with its own [num_blocks, block_size,
    Hkv].

    Blocks past the end are replaced by the row's first one, and what lies past the end inside a block by zeros: those
    places may hold another sequence's NaN, which even a zero weight would carry over. So may those before ``seen``,
    whose blocks may be another's by now: they are zeros, too.
    """
    block_size = cache.shape[1]
    first = torch.arange(-(-length // block_size), device=cache.device) * block_size  # of each block
    used = first < lens.unsqueeze(1)
    blocks = torch.where(used, table[:, : len(first)], table[:, :1]).long().clamp_(min=0)
    # index_select and index_fill_ are several times faster here than the same by indexing.
    bits = cache if scales is None else cache.view(torch.uint8)  # there is no index_fill_ for float8
    tokens = bits.index_select(0, blocks.flatten()).flatten(0, 1)  # [R * num_blocks * block_size, Hkv, D]
    inside = torch.arange(block_size, device=cache.device)
    if seen is None:
        beyond = inside >= torch.where(used, lens.unsqueeze(1) - first, lens.unsqueeze(1)).unsqueeze(2)
    else:
        place = first.unsqueeze(1) + inside
        beyond = (place >= lens.view(-1, 1, 1)) | (place < seen.view(-1, 1, 1))
    tokens.index_fill_(0, beyond.flatten().nonzero().squeeze(1), 0)
    if scales is not None and cache.dtype == torch.int8:
        per_token = scales.index_select(0, blocks.flatten()).flatten(0, 1)
        per_token = torch.where(beyond.flatten().unsqueeze(1), 0, per_token)
        tokens = from_int8_reference(tokens.view(torch.int8), per_token, part)
    elif scales is not None:
        tokens = tokens.view(cache.dtype).float() * scales.unsqueeze(1)
    per_row: torch.Tensor = tokens.to(dtype).unflatten(0, (len(lens), -1))
    return per_row[:, :length].transpose(1, 2)


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor, scale: float, window: int, scores: Scores
) -> torch.Tensor:
    """One query per row: q [R, Hq, D], k and v [R, Hkv, L, D] -> [R, Hq, D]. A group's heads are the query rows."""
    num_rows, num_heads, head_dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    place = torch.arange(length, device=q.device)
    ends = lens.unsqueeze(1)
    mask = place < ends
    if window and abs(window) < length:
        mask &= place >= first_seen_reference(ends - 1, window)
    grouped = q.reshape(num_rows, kv_heads, num_heads // kv_heads, head_dim)
    if scores.changed:
        result = _attend(grouped, k, v, mask[:, None, None], scale, scores, scores.by_group(kv_heads))
    else:
        result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None], scale=scale)
    return result.reshape(num_rows, num_heads, head_dim)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, how: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of q [R, H, Lq, D] over k and v [R, H, L, D] with capped scores, or sinks [H, Lq or 1], in float32."""
    scores = (q @ k.transpose(2, 3)).float() * scale
    if how.softcap:
        scores = (scores / how.softcap).tanh() * how.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.unsqueeze(2).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, column), 3).softmax(3)[..., :-1]
    else:
        weights = scores.softmax(3)
    return weights.to(q.dtype) @ v


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: torch.Tensor, scale: float, window: int, scores: Scores
) -> torch.Tensor:
    """Causal attention of padded queries: q [R, Hq, Lq, D], k and v [R, Hkv, L, D], past [R] (cached before q)."""
    num_queries, length = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if not scores.changed and num_queries == length and not 0 < abs(window) < length and not bool(past.any()):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    place = torch.arange(length, device=q.device)
    position = past.unsqueeze(1) + torch.arange(num_queries, device=q.device)  # [R, Lq]
    mask = place <= position.unsqueeze(2)
    if 0 < abs(window) < length:
        mask &= place >= first_seen_reference(position, window).unsqueeze(2)
        # A padded query may lie a window past the last key; it has to see something to stay finite.
        mask |= (position >= length).unsqueeze(2)
    if scores.changed:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return _attend(q, k, v, mask.unsqueeze(1), scale, scores, scores.by_group(q.shape[1]))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1), scale=scale, enable_gqa=gqa)


def _buckets(first: int, lens: list[int], query_lens: list[int]) -> list[list[int]]:
    """Row indexes from `first` on that have queries and context, grouped by the powers of two of both lengths."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row in range(first, len(lens)):
        if lens[row] > 0 and query_lens[row] > 0:
            groups.setdefault((query_lens[row].bit_length(), lens[row].bit_length()), []).append(row)
    return list(groups.values())


def _decode_rows(lens: list[int]) -> list[list[int]]:
    """Decode rows by batch: all in one, unless padding them to the longest would be most of the work."""
    live = [row for row, length in enumerate(lens) if length > 0]
    if not live:
        return []
    if len(live) * max(lens) <= max(4 * sum(lens), 4096):
        return [live]
    groups: dict[int, list[int]] = {}
    for row in live:
        groups.setdefault(lens[row].bit_length(), []).append(row)
    return list(groups.values())


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_decodes: int,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    decode_lens: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: object = None,
    long_rows: object = (),
    projected: object = None,
) -> torch.Tensor:
    """Attention of new tokens over their sequences' cached tokens (themselves included); see `paged_attention`.

    ``plan``, ``long_rows`` and ``projected`` are for the kernels only.
    """
    if decode_lens is not None:
        num_decodes = int((decode_lens > 0).sum())
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    starts, lens = query_start.tolist(), context_lens.tolist()
    caches: Caches = tuple(
        zip((0, 1), (k_cache, v_cache), (None, None) if kv_scales is None else kv_scales, strict=True)
    )
    common = (caches, slots, context_lens, block_tables, scale, sliding_window, Scores(softcap, sinks))
    for rows in _decode_rows(lens[:num_decodes]):
        _attend_decodes(q, out, rows, max(lens[row] for row in rows), *common)
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    for rows in _buckets(num_decodes, lens, query_lens):
        _attend_prefills(q, out, query_start, rows, query_lens, lens, *common)
    return out


def _attend_decodes(
    q: torch.Tensor, out: torch.Tensor, rows: list[int], length: int, caches: Caches, slots: torch.Tensor,
    context_lens: torch.Tensor, block_tables: torch.Tensor, scale: float, window: int, scores: Scores,
) -> None:  # fmt: skip
    """Attention of decode rows (token index = row) in one padded batch of `length` keys."""
    every = rows == list(range(len(rows)))
    row: slice | torch.Tensor = slice(0, len(rows)) if every else torch.tensor(rows, device=q.device)
    table, lens = block_tables[slots[row].long()], context_lens[row]
    seen = first_seen_reference(lens - 1, window) if window else None
    k, v = (_gather(part, cache, of, table, lens, length, q.dtype, seen) for part, cache, of in caches)
    out[row] = _decode(q[row], k, v, lens, scale, window, scores)


def _attend_prefills(
    q: torch.Tensor, out: torch.Tensor, query_start: torch.Tensor, rows: list[int], query_lens: list[int],
    lens: list[int], caches: Caches, slots: torch.Tensor, context_lens: torch.Tensor, block_tables: torch.Tensor,
    scale: float, window: int, scores: Scores,
) -> None:  # fmt: skip
    """Attention of rows with several queries in one batch padded to the longest of them."""
    row = torch.tensor(rows, device=q.device)
    num_queries, length = max(query_lens[r] for r in rows), max(lens[r] for r in rows)
    table, ends = block_tables[slots[row].long()], context_lens[row]
    first, count = query_start[row].long().unsqueeze(1), query_start.diff()[row].unsqueeze(1)
    place = torch.arange(num_queries, device=q.device)
    real = place < count
    token = torch.where(real, first + place, first)  # padding repeats the row's first token
    past = ends - count.squeeze(1)
    seen = first_seen_reference(past, window) if window else None
    k, v = (_gather(part, cache, of, table, ends, length, q.dtype, seen) for part, cache, of in caches)
    result = _prefill(q[token].transpose(1, 2), k, v, past, scale, window, scores)
    out[token[real]] = result.transpose(1, 2)[real]
