"""How the prompts of a step are cut for the kernel that attends to them: made on the host, which knows all lengths.

Queries are cut into blocks, one program per block and head. Where that gives too few programs for the GPU, or one of
them far more keys than the others, as for a few new tokens behind a long context, the keys of the largest blocks are
cut as well: into pieces, whose results are merged. The lists are uploaded with the step, so a captured CUDA graph
serves any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.triton_import import next_power_of_2

Ints = NDArray[np.int32]

PIECE_KEYS = 128
"""Pieces begin at multiples of it, and so of every tile."""
LEAST_KEYS = 512
"""Of a piece: a shorter one would take about as long to merge as it saves."""
FIELDS = 4
"""Of an entry of either list."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Launch shape of the prefill kernel: queries per program, keys per step."""

    block_queries: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_config(
    max_query_len: int, max_context_len: int, head_dim: int, element_size: int, *, float8: bool = False
) -> PrefillConfig:
    """The launch shape; element_size in bytes, of queries; ``float8``: of the cache, which changes ``tile`` only.
    float32 runs without tensor cores, so its tiles are small."""
    padded = next_power_of_2(head_dim)
    if element_size > 2:
        return PrefillConfig(block_queries=16, tile=16 if padded > 64 else 32, num_warps=8, num_stages=1)
    if padded > 128:
        return PrefillConfig(block_queries=128, tile=16 if float8 else 32, num_warps=8, num_stages=2)
    if max_query_len >= 1024 and max_context_len >= 8192:
        return PrefillConfig(block_queries=128, tile=64, num_warps=8, num_stages=3)
    return PrefillConfig(block_queries=64, tile=64, num_warps=4, num_stages=3)


def fixed_config(head_dim: int, element_size: int, *, float8: bool = False) -> PrefillConfig:
    """The launch shape of a pass whose lengths are not known when it is launched."""
    return prefill_config(0, 0, head_dim, element_size, float8=float8)


def num_shares(config: PrefillConfig, q_heads: int, processors: int) -> int:
    """Of equal size, into which all keys are divided: so many that every multiprocessor has the programs it holds."""
    if config.block_queries * config.tile > 4096:  # long chunks have blocks enough, and the kernel no register left
        return 0
    held = 1 if config.block_queries > 64 else 2
    return held * processors // q_heads


def most_pieces(shares: int) -> int:
    """Of all blocks that are cut, together: a block has two of 1.5 shares at least."""
    return 4 * shares // 3


@dataclass(frozen=True, slots=True)
class QuerySpans:
    """What a step's prompts are cut into.

    ``spans`` [N, 4]: row, first query of the block in the row, first key, end of the keys (0: all of them, the block is
    not cut); pieces come before all else. ``merges`` [M, 4], one entry per block that is cut: its first token in the
    pass, its first piece in ``spans``, number of pieces, number of queries.
    """

    config: PrefillConfig
    spans: Ints
    merges: Ints


def query_spans(
    query_start: Ints,
    context_lens: Ints,
    first_row: int,
    config: PrefillConfig,
    shares: int = 0,
    most_spans: int | None = None,
    least_keys: int = LEAST_KEYS,
) -> QuerySpans:
    """The rows from first_row on cut into at most ``most_spans`` spans, which are enough for all blocks.

    query_start [R + 1] and context_lens [R] as in `paged_attention`. A row's later blocks, which have more keys, come
    before its earlier ones. A block gets as many pieces as it has ``shares`` of all the keys, rounded.
    """
    num_queries, block_queries = np.diff(query_start[first_row:]), config.block_queries
    counts = -(-num_queries // block_queries)
    row = np.repeat(np.arange(len(counts)), counts)
    spans = np.zeros((len(row), FIELDS), np.int32)
    spans[:, 0] = first_row + row
    spans[:, 1] = query = (np.repeat(np.cumsum(counts), counts) - 1 - np.arange(len(row))) * block_queries
    if most_spans is not None:
        shares = min(shares, 3 * (most_spans - len(spans) + 1) // 4)
    if shares < 2:
        return QuerySpans(config, spans, np.empty((0, FIELDS), np.int32))
    members = np.minimum(block_queries, num_queries[row] - query)
    keys = np.maximum(context_lens[first_row:][row] - num_queries[row] + query + members, 0)
    units = -(-keys // PIECE_KEYS)
    total = max(1, int(units.sum()))
    count = np.minimum((2 * shares * units + total) // (2 * total), keys // least_keys)
    cut = np.flatnonzero(count > 1)
    merges = np.empty((len(cut), FIELDS), np.int32)
    merges[:, 0] = query_start[spans[cut, 0]] + query[cut]
    merges[:, 1] = np.cumsum(count[cut]) - count[cut]
    merges[:, 2] = count[cut]
    merges[:, 3] = members[cut]
    return QuerySpans(config, np.concatenate((_pieces(spans, keys, units, count, cut), spans[count < 2])), merges)


def _pieces(spans: Ints, keys: Ints, units: Ints, count: Ints, cut: Ints) -> Ints:
    """The pieces of the blocks ``cut``, one behind the other, of nearly equal length."""
    block = np.repeat(cut, count[cut])
    place = np.arange(len(block)) - np.repeat(np.cumsum(count[cut]) - count[cut], count[cut])
    result = spans[block]
    result[:, 2] = place * units[block] // count[block] * PIECE_KEYS
    result[:, 3] = np.minimum((place + 1) * units[block] // count[block] * PIECE_KEYS, keys[block])
    return result
