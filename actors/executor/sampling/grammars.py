"""Grammars of running sequences: computes which tokens are possible before each of their tokens.

The possible tokens depend on the token before, which the host learns a step later than the device. So a step's masks
are filled after its forward pass has been launched, once the tokens of the step before have come back. The device
thread waits for these while the device works. Steps without grammars wait for nothing.

Masks are filled in parallel. Copies of a matcher share its lexer, which only one thread at a time may use. So slots are
divided into lanes. Sequences of one grammar begin with copies of one matcher within a lane, and of different matchers
in different lanes. There are more lanes than threads: a few masks take a hundred times as long as most, and the rest of
their lane waits meanwhile. Separate threads prepare the matchers that sequences begin with, including their first mask,
from the moment that a plan with the grammar arrives.

The sequence behind each row is recorded when the step is launched. When its tokens arrive, the slot may belong to
another sequence, or to the same one again, which brought the token along as it entered.
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

from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.model.grammars.grammar import GrammarError, make_matcher
from pagebus.bus.messages import Int32Array, StepPlan
from pagebus.bus.messages.field_types import no_ints

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_KEPT = 1024
"""Matchers that are kept ready for sequences to come: one for each grammar and lane that it was used in."""
MAX_THREADS = 8
LANES_PER_THREAD = 2
"""More make it less likely that slow masks wait for each other, but each lane's lexer learns a grammar anew."""
MAX_YIELD_S = 0.01
"""How long other work on a step's tokens is put off for the next step's masks, at most."""


@dataclass(slots=True, eq=False)
class _Follower:
    """Follows one stay of a sequence in a slot. ``start``: what sequences of its grammar begin with in its ``lane``.
    ``history``: its tokens as it entered. ``over``: there is nothing left to follow. ``broken``: because that was not
    possible any further."""

    lane: int
    start: Future[LLMatcher]
    history: list[int]
    matcher: LLMatcher | None = None
    over: bool = False
    broken: bool = False

    def begin(self) -> None:
        """Go on behind the tokens it entered with; waits until the grammar is ready."""
        try:
            self.matcher = self.start.result().deep_copy()
        except GrammarError:
            self.broken = True
        else:
            self.matcher.consume_tokens(self.history)


@dataclass(frozen=True, slots=True)
class _Constrained:
    """The constrained rows of a step [C], and who follows each of them. ``order``: of them, lane by lane, so that
    threads seldom meet in one."""

    rows: Int32Array
    followers: list[_Follower]
    order: list[int]


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
        self._awaited: deque[_Constrained] = deque()
        self._asked = _Constrained(no_ints(), [], [])
        self._to_fill: list[tuple[LLMatcher, int]] = []
        self._tokens: queue.SimpleQueue[Int32Array | None] = queue.SimpleQueue()
        self._waits = False
        self._filling = threading.Event()
        self._num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._num_lanes = LANES_PER_THREAD * self._num_threads
        self._fillers: LLExecutor | None = None
        self._masks = torch.empty((0, -(-limits.vocab_size // 32)), dtype=torch.int32)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Begin to make ready what a plan needs that is going to run."""
        for new in plan.new_sequences:
            if new.sampling.grammar:
                self._start(new.sampling.grammar, self._lane(new.slot))

    def landed(self, tokens: Int32Array) -> None:
        """Apply the tokens [N] of a launched step, in the order of :meth:`launched`. If the device thread waits for
        them it goes first: this method returns soon, when that thread no longer needs Python."""
        self._filling.clear()
        waits = self._waits  # read after the line above: a thread that stops waiting from now on sets the event
        self._tokens.put(tokens)
        if waits:
            self._filling.wait(MAX_YIELD_S)

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
                self._builders = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar")
                self._vocabulary = self._builders.submit(self._load)
            vocabulary = self._vocabulary
            assert vocabulary is not None
            start = self._starts.get((grammar, lane))
            if start is None:
                start = self._builders.submit(lambda: _make_start(vocabulary.result(), grammar))
                self._starts[grammar, lane] = start
                if len(self._starts) > MAX_KEPT:
                    self._starts.popitem(last=False)
            self._starts.move_to_end((grammar, lane))
            return start

    # -- device thread ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty every slot, and ignore tokens that are still to come."""
        self._leave(list(self._followers))

    def apply(self, plan: StepPlan) -> None:
        """Sequences leave, and enter with the tokens they have."""
        if self._followers:
            self._leave(plan.freed_slots.tolist())
        end = 0
        for new in plan.new_sequences:
            end += new.num_tokens
            if new.sampling.grammar:
                history = plan.new_token_ids[end - new.num_tokens + new.num_prompt_tokens : end].tolist()
                lane = self._lane(new.slot)
                self._followers[new.slot] = _Follower(lane, self._start(new.sampling.grammar, lane), history)

    def _leave(self, slots: Collection[int]) -> None:
        for slot in slots:
            if (follower := self._followers.pop(slot, None)) is not None:
                follower.over = True

    def masks(self, work: StepWork) -> torch.Tensor:
        """What the constrained rows of a step may sample [C, ceil(V / 32)] int32, one bit per token, on the host. The
        buffer is filled anew for the next step. Rows that cannot be followed any further are put into ``work.broken``.

        Raises:
            EngineError: the tokens of the step before will not come.
        """
        self._ask(work)
        self._waits = True
        try:
            self._catch_up()
        finally:
            self._waits = False
            self._filling.set()
        self._fill()
        masks = self._masks[: len(self._asked.followers)]
        for index, follower in enumerate(self._asked.followers):
            if follower.broken and not follower.over:
                work.broken.append(int(work.constrained[index]))
                follower.over = True
            if follower.over:
                masks[index] = -1
        return masks

    def launched(self, work: StepWork) -> None:
        """A step for which there were :meth:`masks` is on its way; :meth:`landed` will give its tokens."""
        assert self._asked.rows is work.constrained
        self._awaited.append(self._asked)

    def _ask(self, work: StepWork) -> None:
        """All that can be done before the tokens of the step before are there."""
        if not len(self._masks):
            shape = (self._limits.max_num_seqs, self._masks.shape[1])
            self._masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
        before = self._asked
        followers = [self._followers[slot] for slot in work.sample_slots[work.constrained].tolist()]
        if followers == before.followers:
            self._asked = _Constrained(work.constrained, followers, before.order)
        else:
            self._begin(work, followers)

    def _begin(self, work: StepWork, followers: list[_Follower]) -> None:
        """Whose masks to fill, where."""
        for follower in followers:
            if follower.matcher is None and not follower.over:
                follower.begin()
        order = sorted(range(len(followers)), key=lambda place: followers[place].lane)
        self._asked = _Constrained(work.constrained, followers, order)
        self._to_fill = [(matcher, place) for place in order if (matcher := followers[place].matcher) is not None]

    def _fill(self) -> None:
        """Masks of all that are followed, in the buffer."""
        if self._to_fill:
            masks = self._masks
            self._in_parallel().unsafe_compute_mask_ptr(self._to_fill, masks.data_ptr(), 4 * masks.shape[1], len(masks))
            for matcher, place in self._to_fill:
                if matcher.is_error():
                    self._asked.followers[place].broken = True

    def _catch_up(self) -> None:
        """Follow the tokens of all steps before, waiting for them."""
        while self._awaited:
            step, tokens = self._awaited.popleft(), self._tokens.get()
            if tokens is None:
                raise EngineError("no tokens of the step before: the completion thread has ended")
            self._follow(step, tokens)

    def _follow(self, step: _Constrained, tokens: Int32Array) -> None:
        """Go on with those of a step's tokens [N] that are constrained."""
        ahead: list[tuple[LLMatcher, int]] = []
        followers, sampled = step.followers, tokens[step.rows].tolist()
        for place in step.order:
            follower, token = followers[place], sampled[place]
            if follower.over or follower.matcher is None:
                continue
            if token in self._ends:
                follower.over = True
            else:
                ahead.append((follower.matcher, token))
        if ahead:
            self._in_parallel().consume_token_par(ahead)

    def _in_parallel(self) -> LLExecutor:
        if self._fillers is None:
            from llguidance import LLExecutor

            self._fillers = LLExecutor(self._num_threads)
        return self._fillers


def _make_start(vocabulary: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher whose copies know their first mask, which takes longer than others.

    Raises:
        GrammarError: as :func:`make_matcher`; an impossible mask is found when it is requested.
    """
    matcher = make_matcher(vocabulary, grammar)
    matcher.compute_bitmask()
    return matcher
