"""Grammars in a simulated world: the executors' own code, followed on the thread that simulates everything."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pagebus.actors.executor.batch.layout import BatchLimits
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.sampling import grammars
from pagebus.actors.executor.sampling.grammars import Grammars
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import GrammarError, load_vocabulary, make_matcher, write_grammar
from pagebus.actors.tokenizer.grammar_check import GrammarChecker, Verdict
from pagebus.bus.messages import Int32Array, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LANES = 2


class Here:
    """A pool of threads whose work is done at once."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None: ...


class InTurn:
    """:class:`llguidance.LLExecutor` without threads."""

    def __init__(self, num_threads: int) -> None: ...

    def consume_token_par(self, tokens: list[tuple[LLMatcher, int]]) -> list[bool]:
        return [matcher.consume_token(token) for matcher, token in tokens]

    def unsafe_compute_mask_ptr_with_draft_token(
        self, rows: list[tuple[LLMatcher, int, list[int]]], at: int, size: int, count: int
    ) -> None:
        for matcher, first, drafts in rows:
            taken = 0
            for place in range(first, first + len(drafts) + 1):
                self.unsafe_compute_mask_ptr([(matcher, place)], at, size, count)
                if taken == len(drafts) or not matcher.try_consume_tokens(drafts[taken : taken + 1]):
                    break
                taken += 1
            if taken:
                matcher.rollback(taken)

    def unsafe_compute_mask_ptr(self, rows: list[tuple[LLMatcher, int]], at: int, size: int, count: int) -> None:
        for matcher, place in rows:
            assert place < count
            matcher.unsafe_compute_mask_ptr(at + place * size, size)


@cache
def vocabulary(folder: str) -> LLTokenizer:
    return load_vocabulary(Path(folder), ModelConfig.load(Path(folder)))


made = cache(make_matcher)
"""Matchers are copied before they follow anything, so that all worlds may have the same ones."""


class Constrained:
    """The grammars of one simulated engine. ``late``: tells whether tokens land only when somebody waits for them."""

    def __init__(self, folder: str, config: ModelConfig, limits: BatchLimits, late: Callable[[], bool]) -> None:
        self._grammars = Grammars(limits, lambda: vocabulary(folder), config.eos_token_ids, pinned=False)
        self._late = late
        self._vocab_size = limits.vocab_size
        self._landing: deque[Int32Array] = deque()
        self.prepare, self.apply, self.reset = self._grammars.prepare, self._grammars.apply, self._grammars.reset

    def allowed(self, work: StepWork) -> dict[int, np.ndarray]:
        """By row that samples, the ids that it may have."""
        if not len(work.constrained):
            return {}
        self._land()
        bits = np.unpackbits(self._grammars.masks(work).numpy().view(np.uint8), axis=1, bitorder="little")
        rows = zip(work.constrained.tolist(), bits[:, : self._vocab_size], strict=True)
        return {row: np.flatnonzero(each) for row, each in rows}

    def sampled(self, work: StepWork, tokens: Int32Array) -> None:
        """As an engine tells it, on a CPU at once, on a GPU when the next step is under way."""
        if len(work.constrained):
            self._grammars.launched(work)
            self._landing.append(tokens)
            if not self._late():
                self._land()

    def _land(self) -> None:
        while self._landing:
            self._grammars.landed(self._landing.popleft())


def try_here(folder: str) -> Callable[[GrammarChecker, StructuredOutput], Any]:
    """What :class:`GrammarChecker` asks its process for, without one."""

    async def trial(_: GrammarChecker, wanted: StructuredOutput) -> Verdict:
        try:
            grammar = write_grammar(wanted)
            made(vocabulary(folder), grammar)
        except GrammarError as error:
            return Verdict(problem=str(error))
        return Verdict(grammar)

    return trial


def seal(patch: pytest.MonkeyPatch, folder: str) -> None:
    """No threads, no processes."""
    patch.setattr(grammars, "ThreadPoolExecutor", Here)
    patch.setattr(grammars, "MAX_THREADS", 1)
    patch.setattr(grammars, "LANES_PER_THREAD", LANES)
    patch.setattr(grammars, "make_matcher", made)
    patch.setattr("llguidance.LLExecutor", InTurn)
    patch.setattr(GrammarChecker, "_try", try_here(folder))
