"""Keeping sequences to their grammars: before each of their tokens, which ones are possible.

That depends on the token before, which the host learns a step later than the device. So a thread of its own waits for
the tokens of the step before and fills the masks while the device thread launches the step and the device computes its
forward pass. Only the sampling behind that waits for them. Steps without such sequences wait for nothing.

What sequences of a grammar begin with is made ready in other threads, from the moment that a plan with it arrives.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from actors.executor.errors import EngineError
from actors.executor.followers import Follower, Followers
from actors.executor.step_masks import StepMasks
from actors.executor.step_work import StepWork
from actors.grammar import make_matcher
from bus.messages import Int32Array, StepPlan

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 1024
"""Matchers that are kept ready for sequences to come: one for each grammar and lane that it was used in."""


class Grammars:
    """Fills the masks of steps, in the order in which the device thread tells of them.

    ``load`` reads the vocabulary; it is called in another thread, when the first grammar comes. ``end_ids`` are the
    tokens that end a text. Where the device thread is the one that computes, no other thread fills: ``threaded`` false.
    """

    def __init__(
        self,
        load: Callable[[], LLTokenizer],
        end_ids: Collection[int],
        masks: StepMasks,
        *,
        threaded: bool,
    ) -> None:
        self._load = load
        self._masks = masks
        self._threaded = threaded
        self._builders: ThreadPoolExecutor | None = None
        self._building = threading.Lock()
        self._vocabulary: Future[LLTokenizer] | None = None
        self._starts: OrderedDict[tuple[str, int], Future[LLMatcher]] = OrderedDict()
        self._slots: set[int] = set()
        self._followers = Followers(end_ids)
        self._awaited: deque[StepWork | None] = deque()
        self._tokens: queue.SimpleQueue[Int32Array | None] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- any thread ---------------------------------------------------------------------------------------------------

    def prepare(self, plan: StepPlan) -> None:
        """Begin to make ready what a plan needs that is going to run."""
        for new in plan.new_sequences:
            if new.grammar:
                self._start(new.grammar, self._lane(new.slot))

    def landed(self, tokens: Int32Array) -> None:
        """The tokens [N] of a step with constrained rows. In the order of the steps."""
        self._tokens.put(tokens)

    def abandon(self) -> None:
        """No more tokens will come: masks cannot be filled any more."""
        self._tokens.put(None)

    def _lane(self, slot: int) -> int:
        return slot % self._followers.num_lanes

    def _start(self, grammar: str, lane: int) -> Future[LLMatcher]:
        """The matcher that sequences of a grammar begin with in a lane."""
        with self._building:
            if self._builders is None:
                self._builders = ThreadPoolExecutor(self._followers.num_threads, thread_name_prefix="grammar")
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
        self._slots.clear()
        self._do(self._forget)

    def apply(self, plan: StepPlan) -> None:
        """Sequences leave, and enter with the tokens they have."""
        left = self._slots.intersection(plan.freed_slots.tolist()) if self._slots else set()
        entered, end = {}, 0
        for new in plan.new_sequences:
            end += new.num_tokens
            if new.grammar:
                history = plan.new_token_ids[end - new.num_tokens + new.num_prompt_tokens : end].tolist()
                lane = self._lane(new.slot)
                entered[new.slot] = Follower(new.sequence_id, lane, self._start(new.grammar, lane), history)
        if left or entered:
            self._slots = self._slots - left | entered.keys()
            self._do(partial(self._followers.change, left, entered))

    def fill(self, work: StepWork) -> None:
        """Have the masks of a step's constrained rows filled; :meth:`landed` will give its tokens. Rows that cannot be
        followed any further will have been put into ``work.broken``."""
        self._masks.allocate()
        self._do(partial(self._fill, work))

    def close(self) -> None:
        """There are no more steps: when what was to be done is done, the threads end."""
        if self._thread is None:
            self._end()
        self._jobs.put(None)

    def _do(self, job: Callable[[], None]) -> None:
        """Behind what was to be done before."""
        if not self._threaded:
            job()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._do_jobs, name="engine-grammars", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    # -- the thread that fills masks ----------------------------------------------------------------------------------

    def _do_jobs(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            self._masks.give(error)
        finally:
            self._end()

    def _end(self) -> None:
        if self._builders is not None:
            self._builders.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        self._followers.clear()
        self._awaited = deque([None] * len(self._awaited))

    def _fill(self, work: StepWork) -> None:
        """Wait for the tokens of all steps before, then fill."""
        while self._awaited:
            before, tokens = self._awaited.popleft(), self._tokens.get()
            if tokens is None:
                raise EngineError("no tokens of the step before: the completion thread has ended")
            if before is not None:
                self._followers.take(before, tokens)
        self._awaited.append(work)
        self._followers.fill(work, self._masks.array)
        self._masks.give()
