"""Keeping sequences to their grammars: before each of their tokens, which ones are possible.

That depends on the token before, which the host learns a step later than the device. So a step's masks are filled after
its forward pass has been launched, once the tokens of the step before have come back: the device thread waits for them
while the device works. Steps without such sequences wait for nothing.

Masks are filled in parallel. Copies of a matcher share its lexer, which one thread at a time may use. So slots are
divided into lanes: sequences of the same grammar begin with copies of one matcher in the same lane, of another one in
another lane. These are made ready in threads of their own, from the moment that a plan with the grammar arrives.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from actors.executor.errors import EngineError
from actors.executor.layout import BatchLimits
from actors.executor.step_work import StepWork
from actors.grammar import GrammarError, make_matcher
from bus.messages import Int32Array, StepPlan

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_KEPT = 1024
"""Matchers that are kept ready for sequences to come: one for each grammar and lane that it was used in."""
MAX_LANES = 8


@dataclass(slots=True)
class _Follower:
    """Follows the sequence in a slot. ``start``: what sequences of its grammar begin with in its ``lane``. ``tokens``
    are still to be followed. ``over``: there is nothing left to follow. ``broken``: because that was not possible any
    further."""

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


class Grammars:
    """The followers of all slots. Device thread only, but for :meth:`prepare`, :meth:`landed` and :meth:`close`.

    ``load`` reads the vocabulary; it is called in another thread, when the first grammar comes. ``end_ids`` are the
    tokens that end a text.
    """

    def __init__(
        self, limits: BatchLimits, load: Callable[[], LLTokenizer], end_ids: Collection[int], *, pinned: bool
    ) -> None:
        self._limits = limits
        self._ends = frozenset(end_ids)
        self._load = load
        self._pinned = pinned
        self._builders: ThreadPoolExecutor | None = None
        self._building = threading.Lock()
        self._vocabulary: Future[LLTokenizer] | None = None
        self._starts: OrderedDict[tuple[str, int], Future[LLMatcher]] = OrderedDict()
        self._followers: dict[int, _Follower] = {}
        self._awaited: deque[StepWork | None] = deque()
        self._tokens: queue.SimpleQueue[Int32Array | None] = queue.SimpleQueue()
        self._num_lanes = min(MAX_LANES, len(os.sched_getaffinity(0)))
        self._fillers: LLExecutor | None = None
        self._masks = torch.empty((0, -(-limits.vocab_size // 32)), dtype=torch.int32)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Begin to make ready what a plan needs that is going to run."""
        for new in plan.new_sequences:
            if new.grammar:
                self._start(new.grammar, self._lane(new.slot))

    def landed(self, tokens: Int32Array) -> None:
        """The tokens [N] of a step that :meth:`launched` was told of. In the order of those calls."""
        self._tokens.put(tokens)

    def close(self) -> None:
        """No more tokens will come: end a device thread that waits for them."""
        self._tokens.put(None)
        if self._builders is not None:
            self._builders.shutdown(wait=False, cancel_futures=True)

    def _lane(self, slot: int) -> int:
        return slot % self._num_lanes

    def _start(self, grammar: str, lane: int) -> Future[LLMatcher]:
        """The matcher that sequences of a grammar begin with in a lane."""
        with self._building:
            if self._builders is None:
                self._builders = ThreadPoolExecutor(self._num_lanes, thread_name_prefix="grammar")
                self._vocabulary = self._builders.submit(self._load)
            vocabulary = self._vocabulary
            assert vocabulary is not None
            start = self._starts.get((grammar, lane))
            if start is None:
                start = self._builders.submit(lambda: make_matcher(vocabulary.result(), grammar))
                self._starts[grammar, lane] = start
                if len(self._starts) > MAX_KEPT:
                    self._starts.popitem(last=False)
            self._starts.move_to_end((grammar, lane))
            return start

    # -- device thread ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Every slot is empty; tokens that are still to come are nobody's."""
        self._followers.clear()
        self._awaited = deque([None] * len(self._awaited))

    def apply(self, plan: StepPlan) -> None:
        """Sequences leave, and enter with the tokens they have."""
        if self._followers:
            for slot in plan.freed_slots.tolist():
                self._followers.pop(slot, None)
        end = 0
        for new in plan.new_sequences:
            end += new.num_tokens
            if new.grammar:
                history = plan.new_token_ids[end - new.num_tokens + new.num_prompt_tokens : end].tolist()
                lane = self._lane(new.slot)
                self._followers[new.slot] = _Follower(new.sequence_id, lane, self._start(new.grammar, lane), history)

    def launched(self, work: StepWork) -> None:
        """A step with constrained rows is on its way; :meth:`landed` will give its tokens."""
        self._awaited.append(work)

    def masks(self, work: StepWork) -> torch.Tensor:
        """What the constrained rows of a step may sample [C, ceil(V / 32)] int32, one bit per token, on the host. The
        buffer is filled anew for the next step. Rows that cannot be followed any further are put into ``work.broken``.

        Raises:
            EngineError: the tokens of the step before will not come.
        """
        self._catch_up()
        if not len(self._masks):
            shape = (self._limits.max_num_seqs, self._masks.shape[1])
            self._masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
        followers = [self._followers[slot] for slot in work.sample_slots[work.constrained].tolist()]
        masks = self._masks[: len(followers)]
        self._fill(followers)
        for index, follower in enumerate(followers):
            if follower.broken and not follower.over:
                work.broken.append(int(work.constrained[index]))
                follower.over = True
            if follower.over:
                masks[index] = -1
        return masks

    def _fill(self, followers: list[_Follower]) -> None:
        """Masks of those that are not over, in the buffer; lane by lane, so that threads seldom meet in one."""
        rows: list[tuple[LLMatcher, int]] = []
        for index, follower in sorted(enumerate(followers), key=lambda row: row[1].lane):
            if not follower.over and (matcher := follower.begun()) is not None:
                rows.append((matcher, index))
        if not rows:
            return
        if self._fillers is None:
            from llguidance import LLExecutor

            self._fillers = LLExecutor(self._num_lanes)
        waiting = [(matcher, followers[index].tokens) for matcher, index in rows]
        while ahead := [(matcher, tokens.pop(0)) for matcher, tokens in waiting if tokens]:
            self._fillers.consume_token_par(ahead)
        masks = self._masks
        self._fillers.unsafe_compute_mask_ptr(rows, masks.data_ptr(), 4 * masks.shape[1], len(masks))
        for matcher, index in rows:
            followers[index].broken = matcher.is_error()

    def _catch_up(self) -> None:
        """Take the tokens of all steps before, waiting for them."""
        while self._awaited:
            work, tokens = self._awaited.popleft(), self._tokens.get()
            if tokens is None:
                raise EngineError("no tokens of the step before: the completion thread has ended")
            if work is None:
                continue
            rows = work.constrained
            columns = (work.sample_slots[rows].tolist(), work.sequence_ids[rows].tolist(), tokens[rows].tolist())
            for slot, sequence_id, token in zip(*columns, strict=True):
                follower = self._followers.get(slot)
                if follower is not None and follower.sequence_id == sequence_id and not follower.over:
                    follower.tokens.append(token)
                    follower.over = token in self._ends
