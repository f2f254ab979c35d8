"""Following sequences through their grammars: which tokens have come, and which ones may be next.

Masks are filled in parallel. Copies of a matcher share its lexer, which one thread at a time may use. So slots are
divided into lanes: sequences of the same grammar begin with copies of one matcher in the same lane, of another one in
another lane.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.executor.step_work import StepWork
from actors.grammar import GrammarError
from bus.messages import Int32Array

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLExecutor, LLMatcher

MAX_THREADS = 8
LANES_PER_THREAD = 4
"""Few masks take a hundred times as long as most, and meanwhile the others of their lane wait."""


@dataclass(slots=True)
class Follower:
    """Follows one sequence. ``start``: what sequences of its grammar begin with in its ``lane``. ``tokens`` are still
    to be followed. ``over``: there is nothing left to follow. ``broken``: because that was not possible any further."""

    sequence_id: int
    lane: int
    start: Future[LLMatcher]
    tokens: list[int]
    matcher: LLMatcher | None = None
    over: bool = False
    broken: bool = False

    def begun(self) -> LLMatcher | None:
        """Its matcher, behind the tokens it entered with; waits until the grammar is ready. None if it is broken."""
        if self.matcher is None:
            try:
                self.matcher = self.start.result().deep_copy()
            except GrammarError:
                self.broken = True
                return None
            self.matcher.consume_tokens(self.tokens)
            self.tokens.clear()
        return self.matcher


class Followers:
    """The followers of all slots. One thread only. ``end_ids`` are the tokens that end a text."""

    def __init__(self, end_ids: Collection[int]) -> None:
        self.num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self.num_lanes = LANES_PER_THREAD * self.num_threads
        self._ends = frozenset(end_ids)
        self._by_slot: dict[int, Follower] = {}
        self._threads: LLExecutor | None = None

    def clear(self) -> None:
        """Every slot is empty."""
        self._by_slot.clear()

    def change(self, left: Iterable[int], entered: dict[int, Follower]) -> None:
        """Sequences leave slots, and enter."""
        for slot in left:
            del self._by_slot[slot]
        self._by_slot |= entered

    def take(self, work: StepWork, tokens: Int32Array) -> None:
        """The tokens [N] that ``work`` has sampled: they are followed when the next masks are filled."""
        rows = work.constrained
        columns = (work.sample_slots[rows].tolist(), work.sequence_ids[rows].tolist(), tokens[rows].tolist())
        for slot, sequence_id, token in zip(*columns, strict=True):
            follower = self._by_slot.get(slot)
            if follower is not None and follower.sequence_id == sequence_id and not follower.over:
                follower.tokens.append(token)
                follower.over = token in self._ends

    def fill(self, work: StepWork, masks: Int32Array) -> None:
        """Put what the constrained rows of a step may sample into the first C of ``masks`` [S, ceil(V / 32)], one bit
        per token. Rows that cannot be followed any further are put into ``work.broken``."""
        followers = [self._by_slot[slot] for slot in work.sample_slots[work.constrained].tolist()]
        self._fill(followers, masks)
        for index, follower in enumerate(followers):
            if follower.broken and not follower.over:
                work.broken.append(int(work.constrained[index]))
                follower.over = True
            if follower.over:
                masks[index] = -1

    def _fill(self, followers: list[Follower], masks: Int32Array) -> None:
        """Masks of those that are not over; lane by lane, so that threads seldom meet in one."""
        rows: list[tuple[LLMatcher, int]] = []
        for index, follower in sorted(enumerate(followers), key=lambda row: row[1].lane):
            if not follower.over and (matcher := follower.begun()) is not None:
                rows.append((matcher, index))
        if not rows:
            return
        if self._threads is None:
            from llguidance import LLExecutor

            self._threads = LLExecutor(self.num_threads)
        waiting = [(matcher, followers[index].tokens) for matcher, index in rows]
        while ahead := [(matcher, tokens.pop(0)) for matcher, tokens in waiting if tokens]:
            self._threads.consume_token_par(ahead)
        self._threads.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
        for matcher, index in rows:
            followers[index].broken = matcher.is_error()
