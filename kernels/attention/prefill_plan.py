"""Plans prefill attention: cuts the prompts of a step into spans, on the host, which knows all lengths.

Queries are cut into blocks, one program per block and head. Where that gives too few programs for the GPU, or one
program far more keys than the others, the keys of the largest blocks are cut as well, and the results of their pieces
are merged. An example is a few new tokens behind a long context. The lists are uploaded with the step, so a captured
CUDA graph serves any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagebus.kernels.common.target import Target
from pagebus.kernels.common.triton import next_power_of_2

Ints = NDArray[np.int32]

PIECE_KEYS = 128
"""Pieces begin at multiples of this, and hence of every tile."""
LEAST_KEYS = 512
"""The fewest keys of a piece: a shorter one would take about as long to merge as it saves."""
FEW_TOKENS, FEW_PAST = 32, 8192
"""A step of so few tokens behind so long a past has a launch shape of its own. On an H200, 24 tokens of 32 heads behind
15,000 take 33 microseconds in place of 49, and without a past 12 in place of 8."""
SPAN_FIELDS, MERGE_FIELDS = 5, 4


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch shape of the prefill kernel: queries per program, keys per step, query heads per program.

    ``heads``: 1, or all query heads of a KV head, rounded up to a power of two.
    """

    block_queries: int
    tile: int
    num_warps: int
    num_stages: int
    heads: int = 1


def prefill_config(
    max_query_len: int, max_context_len: int, head_dim: int, element_size: int, *, float8: bool = False,
    capability: int = 90,
) -> PrefillConfig:  # fmt: skip
    """The launch shape; element_size in bytes, of queries; ``float8``: of the cache, which changes ``tile`` only;
    ``capability`` of the GPU. float32 runs without tensor cores, so its tiles are small."""
    padded = next_power_of_2(head_dim)
    if element_size > 2:
        return PrefillConfig(block_queries=16, tile=16 if padded > 64 else 32, num_warps=8, num_stages=1)
    long = max_query_len >= 1024 and max_context_len >= 8192
    if capability // 10 not in (9, 10):
        return _register_config(padded, long, float8=float8, capability=capability)
    if padded > 128:
        return PrefillConfig(block_queries=128, tile=16 if float8 else 32, num_warps=8, num_stages=2)
    if long:
        return PrefillConfig(block_queries=128, tile=64, num_warps=8, num_stages=3)
    return PrefillConfig(block_queries=64, tile=64, num_warps=4, num_stages=3)


def _register_config(padded: int, long: bool, *, float8: bool, capability: int) -> PrefillConfig:
    """On GPUs whose tensor cores take all factors from registers: tiles are smaller than elsewhere."""
    if padded > 128:
        return PrefillConfig(block_queries=64, tile=16 if float8 else 32, num_warps=8, num_stages=2)
    tile, stages = 32 if padded > 64 else 64, 2 if Target(capability, 1).small_memory else 3
    if long:
        return PrefillConfig(block_queries=128, tile=tile, num_warps=8, num_stages=stages)
    return PrefillConfig(block_queries=64, tile=tile, num_warps=4, num_stages=stages)


def fixed_config(
    head_dim: int, element_size: int, *, float8: bool = False, capability: int = 90
) -> PrefillConfig:  # fmt: skip
    """The launch shape of a pass whose lengths are not known when it is launched."""
    return prefill_config(0, 0, head_dim, element_size, float8=float8, capability=capability)


def packed_config(config: PrefillConfig, group: int) -> PrefillConfig:
    """The same tile with all ``group`` query heads of a KV head in it, of fewer queries: what one new token leaves of a
    tile unused matters less then, and its keys are read once for all of these heads."""
    heads = next_power_of_2(group)
    return replace(config, block_queries=max(1, config.block_queries // heads), heads=heads)


def few_config(config: PrefillConfig, group: int) -> PrefillConfig:
    """:func:`packed_config` with twice as many rows and warps: its queries are all of a step of FEW_TOKENS tokens for
    up to four heads, so their keys are read once."""
    packed = packed_config(config, group)
    return replace(packed, block_queries=2 * packed.block_queries, num_warps=2 * config.num_warps)


def num_shares(config: PrefillConfig, programs: int, processors: int) -> int:
    """The number of equal shares of all keys, of which each has this many ``programs``: as many as make every
    multiprocessor hold as many of them as fit."""
    if config.block_queries * config.tile > 4096:  # long chunks have blocks enough, and the kernel no register left
        return 0
    held = 1 if config.block_queries * config.heads * config.num_warps > 256 else 2
    return held * processors // programs


def most_merges(shares: int) -> int:
    """Blocks that are cut: each has more than 1.25 shares."""
    return 4 * shares // 5


def most_pieces(shares: int) -> int:
    """Of all blocks that are cut, together: shares begin inside a block, or with it."""
    return most_merges(shares) + max(shares - 1, 0)


@dataclass(frozen=True, slots=True)
class QuerySpans:
    """The spans of a step's prompts.

    ``spans`` [N, 5]: row, first query of the block in the row, first key, end of the keys, number of the piece (-1: the
    block is whole). ``merges`` [M, 4], one entry per block that is cut: its first token in the pass, its first piece,
    number of pieces, number of queries.
    """

    config: PrefillConfig
    spans: Ints
    merges: Ints


def query_ranges(query_start: Ints, first_row: int, taken: Sequence[tuple[int, int, int]] = ()) -> Ints:
    """The queries of the rows from first_row on, but those ``taken``, of each row (row, first, end) once at most:
    [N, 3] row, first, end. query_start [R + 1] as in `paged_attention`."""
    num_queries = np.diff(query_start)
    rows = np.arange(first_row, len(num_queries), dtype=np.int32)
    ranges = np.stack((rows, np.zeros_like(rows), num_queries[first_row:]), axis=1)
    if not taken:
        return ranges
    row, first, end = np.array(taken, np.int32).T
    ranges[row - first_row, 2] = first
    return np.concatenate((np.stack((row, end, num_queries[row]), axis=1), ranges))


def query_spans(
    query_start: Ints,
    context_lens: Ints,
    ranges: Ints,
    config: PrefillConfig,
    shares: int = 0,
    most_spans: int | None = None,
    least_keys: int = LEAST_KEYS,
) -> QuerySpans:
    """The `query_ranges` cut into at most ``most_spans`` spans, which are enough for all blocks; blocks of more
    keys than one of these equal ``shares`` into pieces, none of which has fewer than ``least_keys``.

    query_start [R + 1] and context_lens [R] as in `paged_attention`. A range's later blocks, which have more keys, come
    before its earlier ones.
    """
    num_queries, block_queries = np.diff(query_start), config.block_queries
    counts = -(-(ranges[:, 2] - ranges[:, 1]) // block_queries)
    row, begin, end = np.repeat(ranges, counts, axis=0).T
    query = begin + (np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(row))) * block_queries
    members = np.minimum(block_queries, end - query)
    keys = np.maximum(context_lens[row] - num_queries[row] + query + members, 0)
    spans = np.full((len(row), SPAN_FIELDS), -1, np.int32)
    spans[:, 0], spans[:, 1], spans[:, 2], spans[:, 3] = row, query, 0, keys
    if most_spans is not None:
        shares = min(shares, most_spans - len(spans) + 1)
    pieces = _pieces(keys, shares, least_keys) if shares > 1 else None
    if pieces is None:
        return QuerySpans(config, spans, np.empty((0, MERGE_FIELDS), np.int32))
    block, begin, end = pieces
    cut, first, count = np.unique(block, return_index=True, return_counts=True)
    merges = np.stack((query_start[spans[cut, 0]] + query[cut], first, count, members[cut]), axis=1, dtype=np.int32)
    cuts = spans[block]
    cuts[:, 2], cuts[:, 3], cuts[:, 4] = begin, end, np.arange(len(block))
    longest_first = cuts[np.argsort(begin - end, kind="stable")]
    return QuerySpans(config, np.concatenate((longest_first, np.delete(spans, cut, axis=0))), merges)


def _pieces(keys: Ints, shares: int, least_keys: int) -> tuple[Ints, Ints, Ints] | None:
    """Blocks with these numbers of ``keys``, if they have more than 1.25 shares, laid end to end and cut where a share
    ends, unless a block ends next to it: block, first key and end of each piece, block by block; None if none is cut.

    What is left of a share at the end of a block fills up with the beginning of the next, so all programs end together.
    """
    share = max(-(-int(keys.sum()) // shares), least_keys)
    large = np.flatnonzero(4 * keys > 5 * share)
    if not len(large):
        return None
    ends = np.cumsum(keys[large])
    at = np.arange(share, ends[-1], share)
    of = np.searchsorted(ends, at, side="right")
    block = large[of]
    begin = (at - ends[of] + keys[block]) // PIECE_KEYS * PIECE_KEYS
    inside = (begin >= least_keys) & (keys[block] - begin >= least_keys)
    cut = np.unique(block[inside])
    block, begin = np.append(cut, block[inside]), np.append(np.zeros_like(cut), begin[inside])
    order = np.lexsort((begin, block))
    block, begin = block[order], begin[order]
    end = np.where(np.diff(block, append=-1) == 0, np.append(begin[1:], 0), keys[block])
    return block.astype(np.int32), begin.astype(np.int32), end.astype(np.int32)
