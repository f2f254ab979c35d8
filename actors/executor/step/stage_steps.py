"""The steps of a stage of a pipeline: what comes before and behind each of them over the ring.

Every rank takes the same plans. Each stage but the first begins a step with what the stage before it has passed on.
The first begins with tokens, of which some are sampled by the last stage. It goes on without those as long as no row
needs them, which the scheduler sees to: it plans no row whose newest token is not known.

Each step passes all stages, also one without rows: a result of rank 0 then proves that every rank has read its plan.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.models.passage import Passage
from pagebus.actors.executor.ranks.ring import Ring
from pagebus.actors.executor.ranks.staged_comm import StagedComm
from pagebus.actors.executor.step.runner import Runner
from pagebus.bus.messages import Int32Array, StepPlan


@dataclass(slots=True)
class Unknown:
    """A step whose sampled tokens have not come back: they belong to ``slots`` at ``positions`` [N]."""

    step: int
    digest: int
    slots: Int32Array
    positions: Int32Array


class StageSteps:
    """Of one rank. All methods belong to the device thread."""

    def __init__(self, ring: Ring, passage: Passage, runner: Runner) -> None:
        self._ring, self._passage, self._runner = ring, passage, runner
        self._digest = 0
        self._unknown: deque[Unknown] = deque()

    @property
    def samples(self) -> bool:
        """Whether this is the last stage."""
        return self._passage.stage.last

    def begin(self, plan: StepPlan, work: StepWork) -> float:
        """Wait for what the step of ``plan`` begins with; returns the seconds that this took.

        Raises:
            EngineError: it did not come in time; a rank is lost or was told something else.
        """
        began = time.perf_counter()
        self._note(plan.step, work)
        if self._passage.stage.first:
            self._take_tokens(np.concatenate([work.slots, plan.chosen_slots, np.array(work.new_slots, np.int32)]))
        else:
            self._take_stream(plan.step, work)
        return time.perf_counter() - began

    def _take_stream(self, step: int, work: StepWork) -> None:
        payload = self._ring.take(step, self._digest)
        if not len(work.slots):
            return
        model = self._runner.model
        dtype, hidden = model.parameters.dtype, model.config.hidden_size
        if len(payload) != work.num_tokens * hidden * dtype.itemsize:
            raise EngineError(f"step {step}: {len(payload)} bytes were passed on for {work.num_tokens} tokens")
        self._passage.entering = torch.frombuffer(payload, dtype=dtype).view(work.num_tokens, hidden)

    def end(self, step: int, work: StepWork, sampled: torch.Tensor | None) -> None:
        """Pass on what the step has come to."""
        if self.samples:
            tokens = torch.empty(0, dtype=torch.int32) if sampled is None else sampled[: len(work.positions)].clone()
            self._ring.send(step, self._digest, tokens)
            return
        leaving, self._passage.leaving = self._passage.leaving, None
        self._ring.send(step, self._digest, torch.empty(0) if leaving is None else leaving)
        if self._passage.stage.first:
            self._unknown.append(Unknown(step, self._digest, work.sample_slots, work.positions))

    def forget(self) -> None:
        """The batch is empty: nobody needs the tokens that are still to come."""
        none = np.empty(0, np.int32)
        for each in self._unknown:
            each.slots, each.positions = none, none

    def _take_tokens(self, slots: Int32Array) -> None:
        """Store tokens in their slots: those that have come, and all that these ``slots`` wait for."""
        needed = max((n for n, each in enumerate(self._unknown, 1) if np.isin(each.slots, slots).any()), default=0)
        while self._unknown and (needed > 0 or self._ring.has_message):
            needed -= 1
            each = self._unknown.popleft()
            tokens = torch.frombuffer(self._ring.take(each.step, each.digest) or bytearray(4), dtype=torch.int32)
            if count := len(each.slots):
                places = torch.from_numpy(each.slots), torch.from_numpy(each.positions)
                self._runner.state.store_sampled(*places, tokens[:count])

    def _note(self, step: int, work: StepWork) -> None:
        """Add the step to the digest of all that this rank was told to compute."""
        parts = (work.slots, work.starts, work.query_start, work.positions, work.indexes)
        for part in (np.array([step], np.int64), *parts, *(delta for _, delta in sorted(work.deltas.items()))):
            self._digest = zlib.crc32(part.tobytes(), self._digest)


def stage_steps(comm: Comm, runner: Runner) -> StageSteps | None:
    """Those of the rank that computes with ``runner``; None if it is not one of a pipeline."""
    passage = runner.model.passage
    if passage is None:
        return None
    assert isinstance(comm, StagedComm)
    return StageSteps(comm.ring, passage, runner)
