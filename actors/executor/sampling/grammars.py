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

Of an engine that speculates the drafts come back with the tokens, and a row that verifies some gets a mask behind each.
A head guesses at the beginning of the step itself: its drafts come while the device computes the forward pass.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.sampling.followers import ConstrainedRuns, Follower
from pagebus.actors.model.grammars.grammar import make_matcher
from pagebus.bus.messages import Int32Array, StepPlan

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_KEPT = 1024
"""Matchers that are kept ready for sequences to come: one for each grammar and lane that it was used in."""
MAX_THREADS = 8
LANES_PER_THREAD = 2
"""More make it less likely that slow masks wait for each other, but each lane's lexer learns a grammar anew."""
MAX_YIELD_S = 0.01
"""How long other work on a step's tokens is put off for the next step's masks, at most."""


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
        self._followers: dict[int, Follower] = {}
        self._awaited: deque[ConstrainedRuns] = deque()
        self._asked = ConstrainedRuns.none()
        self._followed: list[tuple[LLMatcher, int]] = []
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
        """Apply what the device has told of a launched step, its tokens [N] first, in the order of :meth:`launched`. If
        the device thread waits for them it goes first: this method returns soon, when that thread needs no Python."""
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
            end += new.num_tokens - new.first_token
            if new.sampling.grammar:
                history = plan.new_token_ids[end - new.num_tokens + new.num_prompt_tokens : end].tolist()
                lane = self._lane(new.slot)
                self._followers[new.slot] = Follower(lane, self._start(new.sampling.grammar, lane), history)

    def _leave(self, slots: Collection[int]) -> None:
        for slot in slots:
            if (follower := self._followers.pop(slot, None)) is not None:
                follower.stop()

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
        self._asked.take_guesses()
        self._fill(work)
        runs = self._asked
        for row, width, place, follower in zip(runs.rows, runs.widths, runs.places, runs.followers, strict=True):
            if follower.broken and not follower.over:
                work.broken.append(row)
                follower.stop()
            if follower.over:
                self._masks[place : place + width] = -1
        return self._masks[: len(work.constrained)]

    def launched(self, work: StepWork) -> None:
        """A step for which there were :meth:`masks` is on its way; :meth:`landed` will give its tokens."""
        assert self._asked.work is work
        self._awaited.append(self._asked)

    def _ask(self, work: StepWork) -> None:
        """All that can be done before the tokens of the step before are there."""
        if not len(self._masks):
            shape = (self._limits.most_samples, self._masks.shape[1])
            self._masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
        self._asked = ConstrainedRuns.of(work, self._followers, self._asked)
        for follower in self._asked.followers:
            if follower.matcher is None and not follower.over:
                follower.begin()
        runs = self._asked
        self._followed = [
            (matcher, place) for place in runs.order if (matcher := runs.followers[place].matcher) is not None
        ]

    def _fill(self, work: StepWork) -> None:
        """Masks of all that are followed, in the buffer."""
        runs, followed, masks = self._asked, self._followed, self._masks
        if not followed:
            return
        buffer = masks.data_ptr(), 4 * masks.shape[1], len(masks)
        alone, drafted = [], []
        for matcher, place in followed:
            drafts = self._drafts_of(runs.followers[place], runs.widths[place])
            if drafts:
                drafted.append((matcher, runs.places[place], drafts))
            else:
                alone.append((matcher, runs.places[place]))
        if len(work.constrained) > len(runs.rows):
            masks[: len(work.constrained)] = -1  # behind impossible drafts nothing is written
        if alone:
            self._in_parallel().unsafe_compute_mask_ptr(alone, *buffer)
        if drafted:
            self._in_parallel().unsafe_compute_mask_ptr_with_draft_token(drafted, *buffer)
        for matcher, place in followed:
            if matcher.is_error():
                self._break(work, place)

    def _drafts_of(self, follower: Follower, width: int) -> list[int]:
        """Those that a run of ``width`` samples verifies, up to the first that ends the text: there is nothing to
        follow behind it."""
        if width == 1:
            return []
        drafts = follower.drafts[: width - 1]
        ends = [place for place, token in enumerate(drafts) if token in self._ends]
        return drafts[: ends[0]] if ends else drafts

    def _break(self, work: StepWork, place: int) -> None:
        """One cannot be followed any further; if that is so behind a draft, only if the draft is right."""
        runs = self._asked
        follower, width = runs.followers[place], runs.widths[place]
        drafts = self._drafts_of(follower, width)
        number = follower.find_break(drafts, self._masks[runs.places[place] :]) if drafts else 0
        if number == 0:
            follower.give_up()
        elif number is not None:
            work.broken.append(runs.rows[place] + number)

    def _catch_up(self) -> None:
        """Follow the tokens of all steps before, waiting for them."""
        while self._awaited:
            step, tokens = self._awaited.popleft(), self._tokens.get()
            if tokens is None:
                raise EngineError("no tokens of the step before: the completion thread has ended")
            self._follow(step, tokens)

    def _follow(self, step: ConstrainedRuns, told: Int32Array) -> None:
        """Go on with the tokens of a step's runs."""
        turns: list[list[tuple[LLMatcher, int]]] = []
        tokens = step.tokens(told)
        for place in step.order:
            follower = step.followers[place]
            if follower.over or follower.matcher is None:
                continue
            for turn, token in enumerate(tokens[place]):
                if token in self._ends:
                    follower.stop()
                    break
                follower.output.append(token)
                if turn == len(turns):
                    turns.append([])
                turns[turn].append((follower.matcher, token))
        for ahead in turns:
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
