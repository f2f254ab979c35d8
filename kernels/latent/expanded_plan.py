"""Plans attention of long prompts over expanded latents, on the host: which latents are expanded together, and which
queries see them.

Keys and values of all heads take 2 to 64 kB per token, so a long context is expanded piece by piece. A block of queries
goes through the pieces of its row in order; between two of them its running softmax lies in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from pagebus.kernels.attention.cudnn_prefill import LongRow
from pagebus.kernels.attention.prefill_plan import Ints

SCRATCH_BYTES = 512 << 20
"""Of expanded keys and values, at most."""
LEAST_QUERIES = 64
"""Fewer tokens of a row are left to the kernel that expands nothing."""
SPAN_FIELDS = 8

once_per_step = lru_cache(maxsize=16)
"""Caches what every layer of a step would compute again."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the heads: their number, a key's own part and the shared one, values, latents; bytes of a number."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int
    element_size: int

    @property
    def expanded_bytes(self) -> int:
        """Of a token."""
        return self.heads * (self.nope + self.value) * self.element_size

    @property
    def keys_together(self) -> int:
        """Tokens that are expanded at once, a multiple of 128."""
        return max(128, SCRATCH_BYTES // self.expanded_bytes // 128 * 128)


def rows_to_expand(rows: tuple[LongRow, ...], sizes: Sizes) -> tuple[LongRow, ...]:
    """The rows that take fewer operations if their latents are expanded."""
    return tuple(row for row in rows if row.num_queries >= LEAST_QUERIES and _saved(row, sizes) > 0)


def _saved(row: LongRow, sizes: Sizes) -> int:
    """Products and sums per head: what queries of latents take more, and are absorbed with, less the expansion."""
    pairs = row.num_queries * (2 * row.context_len - row.num_queries) // 2
    more = 2 * sizes.rank - sizes.nope - sizes.value
    return pairs * more + (row.num_queries - row.context_len) * sizes.rank * (sizes.nope + sizes.value)


def scratch_bytes(num_tokens: int, longest: int, sizes: Sizes) -> int:
    """Upper bound of the bytes that `expanded_attention` allocates, for this many new tokens in contexts up to
    ``longest``."""
    keys = min(sizes.keys_together, longest * num_tokens)
    entries = (sizes.rank + sizes.rope) * sizes.element_size
    return keys * (sizes.expanded_bytes + entries) + 4 * num_tokens * sizes.heads * (sizes.value + 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """``keys`` tokens that are expanded together.

    ``segments`` [S, 4] int32: row, first token of its context, number of tokens, where they begin in the piece.
    ``spans`` [N, 8] int32, blocks of queries: first token in the pass, number of queries, position of the first, the
    context's token 0 in the piece (negative if the piece begins later), first key and end of the keys as positions, 1
    if the softmax goes on from a piece before, 1 if it goes on in the next.
    """

    keys: int
    segments: Ints
    spans: Ints


def make_pieces(rows: tuple[LongRow, ...], block_queries: int, together: int) -> list[Piece]:
    """Cut the contexts of all rows into pieces of at most ``together`` keys, a multiple of every tile."""
    pieces: list[Piece] = []
    segments: list[tuple[int, int, int, int]] = []
    spans: list[Ints] = []
    used = 0
    for row in rows:
        begin = 0
        while begin < row.context_len:
            if used == together:
                pieces.append(_piece(used, segments, spans))
                segments, spans, used = [], [], 0
            count = min(together - used, row.context_len - begin)
            segments.append((row.row, begin, count, used))
            spans.append(_blocks(row, block_queries, begin, begin + count, used))
            used, begin = used + count, begin + count
    if used:
        pieces.append(_piece(used, segments, spans))
    return pieces


def _piece(keys: int, segments: list[tuple[int, int, int, int]], spans: list[Ints]) -> Piece:
    """Longest blocks first."""
    found = np.concatenate(spans)
    order = np.argsort(found[:, 4] - found[:, 5], kind="stable")
    return Piece(keys, np.array(segments, np.int32), found[order])


def _blocks(row: LongRow, block_queries: int, begin: int, end: int, at: int) -> Ints:
    """The row's blocks of queries that see some of its keys begin..end, which lie ``at`` in the piece."""
    first = np.arange(0, row.num_queries, block_queries)
    count = np.minimum(row.num_queries - first, block_queries)
    last = row.past + first + count  # behind the last key that a block sees
    spans = np.zeros((len(first), SPAN_FIELDS), np.int32)
    spans[:, 0], spans[:, 1], spans[:, 2] = row.first_token + first, count, row.past + first
    spans[:, 3], spans[:, 4], spans[:, 5] = at - begin, begin, np.minimum(last, end)
    spans[:, 6], spans[:, 7] = begin > 0, last > end
    return spans[last > begin]


@dataclass(frozen=True, slots=True)
class DevicePiece:
    """A `Piece` on the device; ``longest`` is the most tokens of a segment."""

    keys: int
    longest: int
    segments: torch.Tensor
    spans: torch.Tensor


@once_per_step
def pieces_on(
    rows: tuple[LongRow, ...], block_queries: int, together: int, device: torch.device
) -> tuple[DevicePiece, ...]:
    """`make_pieces`, copied."""
    return tuple(_copied(make_pieces(rows, block_queries, together), device))


def _copied(pieces: list[Piece], device: torch.device) -> Iterator[DevicePiece]:
    for piece in pieces:
        segments, spans = (
            torch.from_numpy(part).to(device, non_blocking=True) for part in (piece.segments, piece.spans)
        )
        yield DevicePiece(piece.keys, int(piece.segments[:, 2].max()), segments, spans)
