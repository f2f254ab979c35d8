"""Attention of long prompts on Hopper GPUs, by a kernel that needs the keys of a row to be contiguous.

Keys are copied out of the pages. Prompts that fill whole tiles need no copy: their keys are read as projected.

Rows are grouped until their keys fill a buffer. Their queries are cut into blocks; each block and head is one piece of
work for the kernel's persistent programs. Where the last round of work would leave many programs idle, the keys of some
blocks are cut as well, and their results are merged.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.gather import gather_tokens
from pagebus.kernels.attention.hopper_kernel import ROWS, SPAN_FIELDS, launch_hopper_attention, tile_of
from pagebus.kernels.attention.prefill import merge_blocks
from pagebus.kernels.attention.prefill_plan import Ints
from pagebus.kernels.common.rates import HOPPER, PREFILL_BUSY, Rate
from pagebus.kernels.common.target import Target, target_of
from pagebus.kernels.common.triton import LayoutDescriptor, next_power_of_2

QUERIES = 2 * ROWS
"""Queries of a block, which two warpgroups share."""
TOGETHER = 65536
"""Keys of a group of rows; a longer row is a group of its own."""
LEAST_DIM, MOST_DIM = 64, 256
MOST_CUT, PIECES, LEAST_TILES = 8, (2, 3, 4), 8
"""The most blocks whose keys are cut, the numbers of pieces, and the fewest tiles of a piece: of as many each query of
the block sees a key, also where a window cuts them."""
WORK_TILES = 2
"""Overhead of a piece of work, in tiles."""
WORK_S, ROW_S, OVERHEAD_S = 45e-9, 4e-6, 10e-6
"""Costs of this kernel beside its rate: per block and head, per row, and per call."""
COPIED_PER_S = 4e12
"""Bytes per second of copied keys and values, read and written."""


def supports(dtype: torch.dtype, head_dim: int, target: Target | None) -> bool:
    """Whether there is a kernel for such queries on this GPU."""
    fits = dtype in (torch.bfloat16, torch.float16) and LEAST_DIM <= head_dim <= MOST_DIM and head_dim % 16 == 0
    return fits and target is not None and target.capability == 90 and LayoutDescriptor is not None


once_per_step = lru_cache(maxsize=32)
"""Caches what every layer of a step would compute again."""


class HeadShape(NamedTuple):
    """What the kernels' times depend on: heads, their size, and the window of each layer (0: none)."""

    q_heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = (0,)


def faster_rows(rows: tuple[LongRow, ...], shape: HeadShape) -> tuple[LongRow, ...]:
    """The rows that this kernel computes faster than `prefill_attention`, by measured rates."""
    gains = {row._replace(for_hopper=True): gain_s(row, shape) for row in rows}
    faster = tuple(row for row, gained_s in gains.items() if gained_s > 0)
    return faster if sum(gains[row] for row in faster) > OVERHEAD_S else ()


def gain_s(row: LongRow, shape: HeadShape) -> float:
    """Seconds that this kernel saves over `prefill_attention` for a row, in one layer; the mean of all layers."""
    counts = Counter(shape.windows)
    gains = (_gain_s(row, shape, window) * count for window, count in counts.items())
    return sum(gains) / len(shape.windows)


def _gain_s(row: LongRow, shape: HeadShape, window: int) -> float:
    padded = next_power_of_2(shape.head_dim)
    tile = tile_of(padded)
    gained_s = _seconds(PREFILL_BUSY[padded], row, shape, window, 2 * ROWS)
    gained_s -= _seconds(HOPPER[padded], row, shape, window, QUERIES + tile)
    copied = 8 * shape.kv_heads * padded * _Keys.of(row, tile, window).size
    blocks = -(-row.num_queries // QUERIES)
    return gained_s - ROW_S - WORK_S * shape.q_heads * blocks - copied / COPIED_PER_S


def _seconds(rate: Rate, row: LongRow, shape: HeadShape, window: int, beside: int) -> float:
    """Time of products; ``beside``: keys in a block's tiles that a query computes beside those in its window."""
    pairs = seen_keys(row, window and window + beside)
    seen = max(1, 2 * pairs // row.num_queries)  # twice the mean number of keys per query; without a past, the length
    return rate.seconds(4.0 * pairs * shape.q_heads * shape.head_dim, seen)


def seen_keys(row: LongRow, window: int) -> int:
    """Pairs of a query and a key that it sees."""

    def up_to(length: int) -> int:  # all queries before this position
        full = max(length - window, 0) if window else 0
        return full * window + (length - full) * (length - full + 1) // 2

    return up_to(row.context_len) - up_to(row.past)


def scratch_bytes(
    num_tokens: int, longest: int, q_heads: int, kv_heads: int, head_dim: int, element_size: int
) -> int:  # fmt: skip
    """Upper bound of the bytes that `hopper_attention` allocates, for ``num_tokens`` new tokens in contexts up to
    ``longest``."""
    keys = max(min(TOGETHER, longest * num_tokens), _whole(longest, tile_of(head_dim)))
    pieces = MOST_CUT * PIECES[-1] * QUERIES * q_heads * (head_dim + 1) * 4
    return 2 * kv_heads * keys * next_power_of_2(head_dim) * element_size + pieces


def _whole(count: int, tile: int) -> int:
    """Whole tiles."""
    return -(-count // tile) * tile


class _Keys(NamedTuple):
    """Of a row's keys those that are read: from ``begin``, where a tile begins, to ``end``, where one does; its queries
    see none before ``seen``."""

    begin: int
    seen: int
    end: int

    @classmethod
    def of(cls, row: LongRow, tile: int, window: int) -> _Keys:
        seen = max(row.past - window + 1, 0) if window else 0
        return cls(seen // tile * tile, seen, _whole(row.context_len, tile))

    @property
    def size(self) -> int:
        return self.end - self.begin


@once_per_step
def groups(rows: tuple[LongRow, ...], tile: int, window: int = 0) -> list[tuple[LongRow, ...]]:
    """Group rows."""
    found: list[list[LongRow]] = []
    room = 0
    for row in rows:
        keys = _Keys.of(row, tile, window).size
        if keys > room:
            found.append([])
            room = TOGETHER
        found[-1].append(row)
        room -= keys
    return [tuple(group) for group in found]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of the kernel for a group of rows: ``spans`` [N, 8] as in `launch_hopper_attention`, and ``merges`` [M,
    4] of ``pieces`` of ROWS queries as in `QuerySpans`."""

    spans: Ints
    merges: Ints
    pieces: int


def make_work(rows: tuple[LongRow, ...], q_heads: int, programs: int, tile: int, window: int = 0) -> Work:
    """Cut the rows, whose keys are contiguous whole tiles, so that the programs have about equal work."""
    blocks = np.concatenate([_blocks(row, tile, window) for row in rows])
    read = [_Keys.of(row, tile, window) for row in rows]
    firsts = np.cumsum([0, *(keys.size for keys in read)])[:-1] - np.array([keys.begin for keys in read])
    blocks[:, 2] = np.repeat(firsts, [-(-row.num_queries // QUERIES) for row in rows])
    blocks = blocks[np.argsort(blocks[:, 4] - blocks[:, 5], kind="stable")]
    count, parts = _what_to_cut(blocks[:, 5] - blocks[:, 4], q_heads, programs)
    if count == 0:
        return Work(blocks, np.empty((0, 4), np.int32), 0)
    divided = blocks[-count:]
    bounds = divided[:, 4:5] + _bounds(divided[:, 5] - divided[:, 4], parts)
    first = 2 * parts * np.arange(count)
    pieces = np.repeat(divided, parts, axis=0)
    pieces[:, 4], pieces[:, 5] = bounds[:, :-1].ravel(), bounds[:, 1:].ravel()
    pieces[:, 6], pieces[:, 7] = (first[:, None] + np.arange(parts)).ravel(), parts
    spans = np.concatenate((blocks[:-count], pieces))
    longest_first = np.argsort(spans[:, 4] - spans[:, 5], kind="stable")
    merges = np.empty((2, count, 4), np.int32)
    for half in range(2):
        queries = np.minimum(divided[:, 1] - half * ROWS, ROWS)
        merges[half] = np.stack((divided[:, 0] + half * ROWS, first + half * parts, 0 * first + parts, queries), axis=1)
    return Work(spans[longest_first], merges[merges[:, :, 3] > 0], 2 * count * parts)


def _what_to_cut(tiles: Ints, q_heads: int, programs: int) -> tuple[int, int]:
    """How many of the blocks with the least ``tiles``, which come last, are cut, and into how many pieces."""
    least, found = 0.99 * _longest(tiles, q_heads, programs), (0, 1)
    for count in range(1, min(MOST_CUT, len(tiles)) + 1):
        for parts in PIECES:
            if tiles[-1] >= parts * LEAST_TILES:
                pieces = np.append(tiles[:-count], np.diff(_bounds(tiles[-count:], parts)))
                longest = _longest(np.sort(pieces)[::-1], q_heads, programs)
                if longest < least:
                    least, found = longest, (count, parts)
    return found


def _blocks(row: LongRow, tile: int, window: int) -> Ints:
    """The row's queries in blocks, as spans whose keys begin at 0."""
    first = np.arange(0, row.num_queries, QUERIES)
    blocks = np.zeros((len(first), SPAN_FIELDS), np.int32)
    blocks[:, 0] = row.first_token + first
    blocks[:, 1] = np.minimum(row.num_queries - first, QUERIES)
    blocks[:, 3] = row.context_len - row.num_queries + first
    if window:
        blocks[:, 4] = np.maximum(blocks[:, 3] - window + 1, 0) // tile
    blocks[:, 5] = -(-(blocks[:, 3] + blocks[:, 1]) // tile)
    blocks[:, 6] = -1
    return blocks


def _bounds(tiles: Ints, parts: int) -> Ints:
    """Where each of this many ``tiles`` is cut: [N, parts + 1]."""
    return tiles[:, None] * np.arange(parts + 1) // parts


def _longest(tiles: Ints, q_heads: int, programs: int) -> int:
    """What the program with the most work has to do, in tiles: every other round begins with the last program."""
    work = np.repeat(tiles, q_heads) + WORK_TILES
    rounds = np.zeros((-(-len(work) // programs), programs), np.int64)
    rounds.reshape(-1)[: len(work)] = work
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return int(rounds.sum(axis=0).max())


@once_per_step
def _work_on(
    rows: tuple[LongRow, ...], q_heads: int, programs: int, tile: int, window: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    work = make_work(rows, q_heads, programs, tile, window)
    spans, merges = (torch.from_numpy(part).to(device, non_blocking=True) for part in (work.spans, work.merges))
    return spans, merges, work.pieces


def hopper_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    rows: Sequence[LongRow],
    kv_scales: torch.Tensor | None = None,
    projected: tuple[torch.Tensor, torch.Tensor] | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of ``rows`` of q, written to ``out``; other tokens stay. Arguments as in `paged_attention`."""
    target = target_of(q.device)
    assert isinstance(target, Target)
    programs, (q_heads, head_dim) = target.num_multiprocessors, q.shape[1:]
    tile, whole = tile_of(head_dim), head_dim == next_power_of_2(head_dim)
    for group in groups(tuple(rows), tile, sliding_window):
        if whole and projected is not None and kv_scales is None and _lie_together(group, tile):
            k, v = (part[group[0].first_token : group[-1].tokens.stop] for part in projected)
        else:
            k, v = _copied(k_cache, v_cache, q.dtype, slots, block_tables, group, kv_scales, sliding_window)
        spans, merges, pieces = _work_on(group, q_heads, programs, tile, sliding_window, q.device)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": q.device}
        partial = torch.empty((pieces, ROWS, q_heads, head_dim), **floats)
        lse = torch.empty((pieces, ROWS, q_heads), **floats)
        launch_hopper_attention(q, k, v, out, partial, lse, spans, scale, programs, sliding_window, softcap, sinks)
        if pieces:
            merge_blocks(out, partial, lse, merges, sinks)
        del k, v, partial, lse  # before the next are made


@once_per_step
def _lie_together(rows: tuple[LongRow, ...], tile: int) -> bool:
    """Whether the rows consist of new tokens only, and fill consecutive tiles."""
    first = rows[0].first_token
    starts = itertools.accumulate((row.num_queries for row in rows), initial=first)
    return all(
        row.past == row.num_queries % tile == 0 and row.first_token == start
        for row, start in zip(rows, starts, strict=False)
    )


def _copied(
    k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype, slots: torch.Tensor, block_tables: torch.Tensor,
    rows: tuple[LongRow, ...], kv_scales: torch.Tensor | None, window: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Copy keys and values that the rows see, one row after the other in whole tiles, and in padded heads: [N, Hkv, B]
    each, as in `launch_hopper_attention`."""
    kv_heads, head_dim = k_cache.shape[2:]
    read = [_Keys.of(row, tile_of(head_dim), window) for row in rows]
    padded = next_power_of_2(head_dim)
    make = torch.empty if padded == head_dim else torch.zeros
    copies = make((2, sum(keys.size for keys in read), kv_heads, padded), dtype=dtype, device=k_cache.device)
    k, v = copies[..., :head_dim].unbind()
    size = read[0].end
    if read[0].seen == 0 and all(
        row.row == rows[0].row + i and row.context_len == size and keys.seen == 0
        for i, (row, keys) in enumerate(zip(rows, read, strict=True))
    ):
        gather_tokens(k_cache, v_cache, slots[rows[0].row :][: len(rows)], 0, k, v, block_tables, kv_scales)
        return copies[0], copies[1]
    first = 0
    for row, keys in zip(rows, read, strict=True):
        begin, end = first + keys.seen - keys.begin, first + row.context_len - keys.begin
        slot = slots[row.row :][:1]
        gather_tokens(k_cache, v_cache, slot, keys.seen, k[begin:end], v[begin:end], block_tables, kv_scales)
        for hidden in (copies[:, first:begin], copies[:, end : first + keys.size]):
            if hidden.shape[1]:
                hidden.zero_()  # hidden, but it may be NaN, and NaN times 0 is NaN
        first += keys.size
    return copies[0], copies[1]
