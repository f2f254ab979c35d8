"""Keeping sequences to their grammars: before each of their tokens, which ones are possible.

That depends on the token before, which the host learns a step later than the device. So a step's masks are filled after
its forward pass has been launched, once the tokens of the step before have come back: the device thread waits for them
while the device works. Steps without such sequences wait for nothing.

Grammars are made ready in threads of their own, from the moment that a plan with them arrives. Sequences of the same
grammar begin with copies of the same matcher.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from actors.executor.batch import BatchLimits, StepWork
from actors.executor.errors import EngineError
from actors.grammar import GrammarError, make_matcher
from bus.messages import Int32Array, StepPlan

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_KEPT = 256
"""Grammars that are kept ready for sequences to come."""
NUM_BUILDERS = 2


@dataclass(slots=True)
class _Follower:
    """Follows the sequence in a slot. ``history``: tokens it had when it entered. ``over``: there is nothing left to
    follow, because it has ended or its grammar cannot be followed any further."""

    sequence_id: int
    start: Future[LLMatcher]
    history: list[int]
    matcher: LLMatcher | None = None
    over: bool = False

    def ready(self) -> LLMatcher:
        """Its matcher, behind the history; waits until the grammar is ready.

        Raises:
            GrammarError: the grammar cannot be used.
        """
        if self.matcher is None:
            self.matcher = self.start.result().deep_copy()
            self.matcher.consume_tokens(self.history)
        return self.matcher


class Grammars:
    """The followers of all slots. Device thread only, but for :meth:`prepare`, :meth:`landed` and :meth:`close`.

    ``load`` reads the vocabulary; it is called in another thread, when the first grammar comes.
    """

    def __init__(self, limits: BatchLimits, load: Callable[[], LLTokenizer], *, pinned: bool) -> None:
        self._limits = limits
        self._load = load
        self._pinned = pinned
        self._builders: ThreadPoolExecutor | None = None
        self._building = threading.Lock()
        self._vocabulary: Future[LLTokenizer] | None = None
        self._starts: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._followers: dict[int, _Follower] = {}
        self._awaited: deque[StepWork] = deque()
        self._tokens: queue.SimpleQueue[Int32Array | None] = queue.SimpleQueue()
        self._filler: LLExecutor | None = None
        self._masks = torch.empty((0, -(-limits.vocab_size // 32)), dtype=torch.int32)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Begin to make ready what a plan needs that is going to run."""
        for new in plan.new_sequences:
            if new.grammar:
                self._start(new.grammar)

    def landed(self, tokens: Int32Array) -> None:
        """The tokens [N] of a step that :meth:`launched` was told of. In the order of those calls."""
        self._tokens.put(tokens)

    def close(self) -> None:
        """No more tokens will come: end a device thread that waits for them."""
        self._tokens.put(None)
        if self._builders is not None:
            self._builders.shutdown(wait=False, cancel_futures=True)

    def _start(self, grammar: str) -> Future[LLMatcher]:
        """The matcher that sequences of a grammar begin with."""
        with self._building:
            if self._builders is None:
                self._builders = ThreadPoolExecutor(NUM_BUILDERS, thread_name_prefix="grammar")
                self._vocabulary = self._builders.submit(self._load)
            vocabulary = self._vocabulary
            assert vocabulary is not None
            start = self._starts.get(grammar)
            if start is None:
                start = self._builders.submit(lambda: make_matcher(vocabulary.result(), grammar))
                self._starts[grammar] = start
                if len(self._starts) > MAX_KEPT:
                    self._starts.popitem(last=False)
            self._starts.move_to_end(grammar)
            return start

    # -- device thread ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Every slot is empty."""
        self._followers.clear()

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
                self._followers[new.slot] = _Follower(new.sequence_id, self._start(new.grammar), history)

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
        if self._filler is None:
            from llguidance import LLExecutor

            self._filler = LLExecutor()
            shape = (self._limits.max_num_seqs, self._masks.shape[1])
            self._masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
        masks = self._masks[: len(work.constrained)]
        followed: list[tuple[int, _Follower, LLMatcher]] = []
        for index, row in enumerate(work.constrained.tolist()):
            follower = self._followers[int(work.sample_slots[row])]
            masks[index] = -1
            if not follower.over:
                try:
                    followed.append((index, follower, follower.ready()))
                except GrammarError:
                    _give_up(follower, work, row)
        pairs = [(matcher, index) for index, _, matcher in followed]
        if pairs:
            self._filler.unsafe_compute_mask_ptr(pairs, masks.data_ptr(), 4 * masks.shape[1], len(masks))
        for index, follower, matcher in followed:
            if matcher.is_error():
                masks[index] = -1
                _give_up(follower, work, int(work.constrained[index]))
        return masks

    def _catch_up(self) -> None:
        """Follow the tokens of all steps before, waiting for them."""
        while self._awaited:
            work, tokens = self._awaited.popleft(), self._tokens.get()
            if tokens is None:
                raise EngineError("no tokens of the step before: the completion thread has ended")
            assert self._filler is not None
            assert self._vocabulary is not None
            ends = self._vocabulary.result().eos_tokens
            new: list[tuple[LLMatcher, int]] = []
            for row in work.constrained.tolist():
                follower, token = self._followers.get(int(work.sample_slots[row])), int(tokens[row])
                if follower is None or follower.over or follower.sequence_id != work.sequence_ids[row]:
                    continue
                if token in ends:
                    follower.over = True
                else:
                    new.append((follower.ready(), token))
            if new:
                self._filler.consume_token_par(new)


def _give_up(follower: _Follower, work: StepWork, row: int) -> None:
    follower.over = True
    work.broken.append(row)
