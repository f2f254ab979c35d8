"""Buckets: the fixed shapes to which steps are padded, so that one CUDA graph serves many steps.

A step of decodes alone is padded to a number of rows. Any other step is padded to a number of tokens and a number of
rows. Flags on the device mark its decodes, so decodes and prompts may be mixed in any proportion. In the largest steps,
and those with long chunks, only the layers between attentions are padded, to a number of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from pagebus.actors.executor.batch.layout import PADDED_SAMPLES, VERIFIED_SIZES
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.kernels.attention.prefill_plan import FEW_PAST, FEW_TOKENS

ROW_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096)
LEAST_TOKENS = 32
SLOW_SIZES = {304: 312, 400: 408, 416: 432, 448: 456}
"""Numbers of tokens or rows in place of which there are larger bucket sizes, which cuBLAS (CUDA 13.0, H200) multiplies
faster, or no slower. Gate and up of llama8b take 266 µs for 448 tokens and 153 for 456
(docs/measurements/h200-issue18/slow-sizes.txt)."""
SPARE_SPANS = 32
"""Blocks of queries held ready beyond those that the tokens fill, because a row's last block is seldom full. Blocks
with divided keys use the rest of them. There are more where rows are many because of their drafts: a block for each.
Steps with more short prompts than these have buckets with a block for each row."""
LONG_QUERY, LONG_CONTEXT = 1024, 8192
"""Attention of longer queries over longer contexts uses different launch shapes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Room for ``rows`` rows with ``tokens`` tokens in total, and ``spans`` blocks of queries of rows that are no
    decodes.

    Without spans it is for decodes alone, one token per row. With ``pieces`` it is for the tokens of any rows, outside
    attention (see :mod:`pagebus.actors.executor.graphs.piecewise_graphs`). If it is ``adapted``, its rows may have
    adapters: any of them, of any rank. With ``runs`` no row has more tokens than one with drafts may have. With
    ``long_past`` few tokens attend in the launch shape that is quicker behind a long past; there may then be no
    ``decodes`` among the rows, for which kernels would be launched, too.
    """

    rows: int
    tokens: int
    spans: int = 0
    pieces: bool = False
    adapted: bool = False
    runs: bool = False
    long_past: bool = False
    decodes: bool = True

    @property
    def most_decodes(self) -> int:
        """So many rows may be decodes."""
        return self.rows if self.decodes else 0


def decode_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, multiples of 8 up to 256, then sixteen sizes per doubling, up to and including ``largest``; larger
    ones in place of slow ones."""
    sizes, size = [each for each in (1, 2, 4) if each < largest], 8
    while size < largest:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 16)
    return _quick(sizes, largest)


def token_sizes(largest: int) -> list[int]:
    """Multiples of 32 up to 256, then eight sizes per doubling (padding up to 12%), up to and including ``largest``;
    larger ones in place of slow ones."""
    sizes, size = [], LEAST_TOKENS
    while size < largest:
        sizes.append(size)
        size += max(LEAST_TOKENS, (1 << (size.bit_length() - 1)) // 8)
    return _quick(sizes, largest)


def _quick(sizes: list[int], largest: int) -> list[int]:
    quick = {SLOW_SIZES.get(size, size) for size in sizes}
    return [*sorted(size for size in quick if size < largest), largest]


def _shares(size: int, factor: int) -> list[int]:
    """``size``, repeatedly reduced by ``factor``."""
    sizes = [size]
    while sizes[-1] >= factor:
        sizes.append(sizes[-1] // factor)
    return sizes


class Buckets:
    """Buckets of up to ``max_num_seqs`` rows and ``largest`` tokens; ``block_queries`` queries form one block.

    Without ``decodes_apart`` there are none for decodes alone: rows of one token are prompts, with a block each. Other
    steps of up to ``largest_pieces`` tokens use piecewise buckets. Steps that sample more tokens than they have rows
    are padded to as many rows as tokens that they sample; more than a full batch are padded to a quarter more, or to
    ``max_samples``. Those that sample behind every token, up to ``max_verified``, have buckets of their own, since
    products of few tokens are fast.
    """

    def __init__(
        self,
        max_num_seqs: int,
        largest: int,
        block_queries: int,
        *,
        decodes_apart: bool = True,
        largest_pieces: int = 0,
        max_samples: int = 0,
        max_verified: int = 0,
        packs_few: bool = False,
    ) -> None:
        self.block_queries = block_queries
        self._decodes_apart = decodes_apart
        most_rows = min(max_num_seqs, largest)
        self._decodes = decode_sizes(most_rows)
        most_samples = max(most_rows, min(max_samples, largest))
        self._full = full = max(most_rows, min(most_samples, PADDED_SAMPLES))
        sizes = (size for size in ROW_SIZES if size < full)
        self._rows = sorted({*sizes, full, min(full + full // 4, most_samples), most_samples})
        self._tokens = token_sizes(largest)
        shapes = list(product(self._rows, self._tokens))
        mixed = {self._mixed(*shape) for shape in shapes}
        few = sorted((each for each in mixed if packs_few and each.tokens <= FEW_TOKENS), key=lambda each: each.rows)
        self._few = {
            (each, decodes): replace(each, long_past=True, decodes=decodes) for each in few for decodes in (False, True)
        }
        self._pieces = [Bucket(0, size, pieces=True) for size in token_sizes(largest_pieces) if size >= LONG_QUERY]
        most = min(max_verified, largest)
        self._verified = [self._verifying(size) for size in VERIFIED_SIZES if size < most]
        if most > 0:
            self._verified.append(self._verifying(most))
        mixed |= {*self._verified, *(self._mixed(*shape, short=True) for shape in shapes)}
        self._all_mixed = sorted(mixed, key=lambda each: (each.tokens, each.rows, each.spans))

    def largest(self) -> Bucket:
        """The largest bucket for whole steps with prompts."""
        return self._mixed(self._rows[-1], self._tokens[-1], short=True)

    @property
    def most_spans(self) -> int:
        """Of any bucket for whole steps."""
        return max(each.spans for each in self._all_mixed)

    @property
    def verified(self) -> list[Bucket]:
        """Those for decodes with drafts, the smallest first."""
        return list(self._verified)

    def largest_pieces(self) -> Bucket | None:
        """The largest piecewise bucket; None if there is none."""
        return self._pieces[-1] if self._pieces else None

    def first(self) -> list[Bucket]:
        """A few buckets that together hold any step that a bucket holds: steps with prompts padded to at most twice
        their tokens, decodes to at most eight times their rows. The largest comes first."""
        sizes = [size for size in _shares(self.largest().tokens, 2) if size >= self._tokens[0]]
        mixed = [self._mixed(self._most_rows(size), size, short=True) for size in sizes]
        decodes = [self._decode(size) for size in _shares(self._decodes[-1], 8)]
        return list(dict.fromkeys(mixed + decodes))

    def covering_kernels(self) -> list[Bucket]:
        """The first buckets, decodes of powers of two, and the largest pieces: together they launch every kernel."""
        powers = [self._decode(size) for size in reversed(self._decodes) if size & (size - 1) == 0]
        others = [*reversed(self._verified), *self._few.values(), *self._pieces[-1:]]
        return list(dict.fromkeys([*self.first(), *powers, *others]))

    def later(self) -> list[Bucket]:
        """The other buckets, in order of capture: pieces of the largest steps, which simultaneous prompts make; all
        others for decodes alone; pieces of steps too large for other graphs; prompts beside a full batch and a nearly
        empty one; many short prompts, of sizes between the first; and, unless a step has asked for them before, decodes
        with drafts, which perhaps never come."""
        rows = sorted({self._rows[0], self._full}, reverse=True)
        mixed = [self._mixed(each, tokens) for each in rows for tokens in self._tokens if tokens >= each]
        sizes = [(more + fewer) // 2 for more, fewer in pairwise(_shares(self._tokens[-1], 2)) if fewer >= self._full]
        mixed += [self._mixed(self._full, size, short=True) for size in sizes]
        decodes = [self._decode(size) for size in reversed(self._decodes)]
        pieces = [bucket for bucket in reversed(self._pieces) if bucket.tokens > self._tokens[-1]]
        few = self._few.values()
        wanted = dict.fromkeys([*pieces[:1], *decodes, *pieces, *mixed, *few, *reversed(self._verified)])
        return [bucket for bucket in wanted if bucket not in self.first()]

    def row_sizes(self, least: int = 1) -> list[int]:
        """The numbers of rows, from ``least`` on, to which passes of one token per sequence are padded."""
        return self._decodes[bisect_left(self._decodes, least) :]

    def above(self, bucket: Bucket) -> list[Bucket]:
        """Larger buckets of the same kind that can replace it, fewest tokens first."""
        if bucket.pieces:
            return []
        if not bucket.spans:
            return [Bucket(size, size) for size in self._decodes if size > bucket.rows]
        room = [each for each in self._all_mixed if each.rows >= bucket.rows and each.tokens >= bucket.tokens]
        return [each for each in room if each.spans >= bucket.spans and each.runs <= bucket.runs]

    def fitting(self, work: StepWork) -> Bucket | None:
        """The smallest bucket that holds the step; None if none does."""
        num_rows = len(work.slots)
        if work.decode_only:
            return self._decode(num_rows) if 0 < num_rows <= self._decodes[-1] else None
        queries = np.diff(work.query_start[work.num_decodes :])
        num_spans = int((-(-queries // self.block_queries)).sum())
        if self._verified and len(work.positions) == work.num_tokens <= self._verified[-1].tokens:
            bucket = next(each for each in self._verified if each.tokens >= work.num_tokens)
            if num_spans <= bucket.spans:
                return bucket
        is_long = work.max_query_len >= LONG_QUERY and work.max_context_len >= LONG_CONTEXT
        if work.num_tokens <= self._tokens[-1] and not is_long:
            sampled = max(num_rows, len(work.positions))  # rows with drafts sample several tokens
            if sampled <= self._rows[-1]:
                bucket = self._mixed(sampled, work.num_tokens)
                if num_spans > bucket.spans:
                    return self._mixed(sampled, work.num_tokens, short=True)
                few = self._few.get((bucket, work.num_decodes > 0), bucket)
                return few if work.max_context_len >= FEW_PAST else bucket
        if work.num_tokens < LONG_QUERY:
            return None
        return next((bucket for bucket in self._pieces if bucket.tokens >= work.num_tokens), None)

    def _decode(self, num_rows: int) -> Bucket:
        if not self._decodes_apart:
            return self._mixed(num_rows, num_rows)
        size = self._decodes[bisect_left(self._decodes, num_rows)]
        return Bucket(size, size)

    def _verifying(self, size: int) -> Bucket:
        """Rows with drafts have at least two tokens, and a block of queries each."""
        return Bucket(size, size, size // 2 + SPARE_SPANS if self._decodes_apart else size, runs=True)

    def _most_rows(self, num_tokens: int) -> int:
        """The most rows that this many tokens can fill (any such step fits), at least the smallest size."""
        return max((size for size in self._rows if size <= num_tokens), default=self._rows[0])

    def _mixed(self, num_rows: int, num_tokens: int, *, short: bool = False) -> Bucket:
        """For rows of which some are no decodes; ``short``: of any lengths, so there is a block for each row."""
        rows = self._rows[bisect_left(self._rows, num_rows)]
        tokens = self._tokens[bisect_left(self._tokens, max(num_tokens, rows))]
        spare = SPARE_SPANS + max(0, rows - self._full) // 2 if self._decodes_apart else rows
        filled = -(-tokens // self.block_queries)
        return Bucket(rows, tokens, max(filled + spare, min(filled + rows, tokens) if short else 0))
