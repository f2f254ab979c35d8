"""Completes launched steps in order: waits for their tokens, builds their results and passes these on."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pagebus.actors.executor.batch.results import ResultBuilder, without_rows
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.agreement import copied_by_all
from pagebus.actors.executor.device.promises import Promise
from pagebus.actors.executor.memory.swap import CopyWatch
from pagebus.actors.executor.sampling.grammars import Grammars
from pagebus.actors.executor.sampling.logprobs import Scores
from pagebus.actors.executor.step.readback import Origin, Readback, ReadbackPool
from pagebus.actors.executor.step.step_kernels import StepKernels
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.spans import Spans
from pagebus.bus.messages import Int32Array, StepPlan, StepResult


@dataclass(slots=True)
class EngineStats:
    """Running totals since the engine became ready; each field is written by one thread."""

    steps: int = 0
    busy_s: float = 0.0
    """Seconds in which the device worked on steps: by events on CUDA, by the clock on a CPU."""
    host_s: float = 0.0
    """Seconds in which the device thread validated and launched steps."""
    kernels: dict[StepKernels, int] = field(default_factory=dict)
    """Number of steps by the kernels that they ran. Written by the device thread."""

    def ran(self, kernels: StepKernels) -> None:
        """Count a step that runs these kernels."""
        self.kernels[kernels] = self.kernels.get(kernels, 0) + 1

    def launched(self, host_s: float) -> None:
        """Add the time in which the device thread launched a step."""
        self.host_s += host_s

    def completed(self, busy_s: float) -> None:
        """Count a step, and the time that the device worked on it."""
        self.steps += 1
        self.busy_s += busy_s


@dataclass(frozen=True, slots=True)
class Queued:
    """A plan and its time of arrival, in seconds of the wall clock."""

    plan: StepPlan
    scheduler_epoch: int
    received_s: float


@dataclass(frozen=True, slots=True)
class Launched:
    """A step in flight on the device. ``copied``: set when its copies between the tiers are done. ``departure``: sends
    its states or tokens on to the next stage. ``promises``: of blocks that it may have used before it was known that
    they had come."""

    queued: Queued
    work: StepWork
    launched_s: float
    readback: Readback
    copied: torch.cuda.Event | None
    departure: Callable[[Int32Array], None] | None = None
    promises: tuple[Promise, ...] = ()


class Completion:
    """Completes the steps of one engine. On CUDA a separate thread runs :meth:`run`; on a CPU the device thread calls
    :meth:`finish`."""

    def __init__(
        self, settings: Settings, config: ModelConfig, on_result: Callable[[StepResult], None], spans: Spans | None
    ) -> None:
        self.stats = EngineStats()
        self._on_result = on_result
        self._spans = spans
        self._results = ResultBuilder(settings.max_num_seqs, config.vocab_size)
        self._samples = config.stage is None or config.stage.last
        self._launched: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()

    def put(self, launched: Launched | None) -> None:
        """Add a launched step, or None after the last one. Device thread."""
        self._launched.put(launched)

    def run(self, pool: ReadbackPool, grammars: Grammars, check: Callable[[], None]) -> None:
        """Wait for the event behind each step's read-back, ``check`` the exchange of ranks, and complete the step, to
        the last."""
        watch, origin = CopyWatch(), Origin() if self._spans is not None else None
        while (launched := self._launched.get()) is not None:
            readback = launched.readback
            tokens, busy_s = readback.wait(check)
            for promise in launched.promises:
                promise.prove()
            if launched.departure is not None:
                launched.departure(tokens)
            if len(launched.work.constrained) and self._samples:
                grammars.landed(tokens)
            if self._spans is not None and origin is not None:
                began_s, ended_s = readback.span(origin)
                self._spans.add("device", launched.queued.plan.step, began_s, ended_s)
            give_scores(readback.scores, launched.work)
            copied_step = watch.step_done(launched.queued.plan.step, launched.copied)
            if readback.agreed is not None:
                copied_step = min(copied_step, copied_by_all(readback.agreed, launched.queued.plan.step))
            pool.give_back(readback)
            self.finish(launched.queued, launched.work, tokens, launched.launched_s, busy_s, copied_step)

    def finish(
        self,
        queued: Queued,
        work: StepWork,
        tokens: Int32Array,
        launched_s: float,
        busy_s: float,
        copied_step: int,
    ) -> None:
        """Pass on the step's result; of a stage that does not sample, without rows."""
        build = self._results.build if self._samples else without_rows
        result = build(
            work,
            tokens,
            step=queued.plan.step,
            scheduler_epoch=queued.scheduler_epoch,
            received_s=queued.received_s,
            launched_s=launched_s,
            done_s=time.time(),
            copied_step=copied_step,
            busy_s=busy_s,
        )
        self.stats.completed(busy_s)
        self._on_result(result)


def give_scores(scores: Scores | None, work: StepWork) -> None:
    """Store the log probabilities that were read back in the step's work."""
    if scores is not None and work.logprob_rows is not None:
        scores.give(work.logprob_rows)
