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

from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.models.network import Network
from pagebus.actors.executor.models.passage import Passage
from pagebus.actors.executor.ranks.ring import Ring
from pagebus.actors.executor.ranks.staged_comm import StagedComm
from pagebus.bus.messages import Int32Array, StepPlan


@dataclass(slots=True)
class Unknown:
    """A step whose sampled tokens have not come back: they belong to ``slots`` at ``positions`` [N]."""

    step: int
    digest: int
    slots: Int32Array
    positions: Int32Array


class WholeSteps:
    """Those of an executor that is no pipeline. All methods belong to the device thread."""

    def begin(self, plan: StepPlan, scheduler_epoch: int, work: StepWork) -> float:
        """Wait for what the step of ``plan`` begins with; returns the seconds that this took. Another scheduler's first
        plan finds an empty batch.

        Raises:
            EngineError: it did not come in time; a rank is lost or was told something else.
        """
        return 0.0

    def end(self, step: int, work: StepWork, sampled: torch.Tensor | None) -> None:
        """Pass on what the step has come to."""


class StageSteps(WholeSteps):
    """Those of one rank of a pipeline, whose tokens are in ``state``."""

    def __init__(self, ring: Ring, passage: Passage, model: Network, state: DeviceBatch) -> None:
        self._ring, self._passage, self._model, self._state = ring, passage, model, state
        self._digest = self._epoch = 0
        self._unknown: deque[Unknown] = deque()

    def begin(self, plan: StepPlan, scheduler_epoch: int, work: StepWork) -> float:
        """As of :class:`WholeSteps`."""
        began = time.perf_counter()
        if scheduler_epoch != self._epoch:
            self._epoch = scheduler_epoch
            self._forget()
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
        model = self._model
        dtype, hidden = model.parameters.dtype, model.config.hidden_size
        if len(payload) != work.num_tokens * hidden * dtype.itemsize:
            raise EngineError(f"step {step}: {len(payload)} bytes were passed on for {work.num_tokens} tokens")
        self._passage.entering = torch.frombuffer(payload, dtype=dtype).view(work.num_tokens, hidden)

    def end(self, step: int, work: StepWork, sampled: torch.Tensor | None) -> None:
        """As of :class:`WholeSteps`."""
        if self._passage.stage.last:
            tokens = torch.empty(0, dtype=torch.int32) if sampled is None else sampled[: len(work.positions)].clone()
            self._ring.send(step, self._digest, tokens)
            return
        leaving, self._passage.leaving = self._passage.leaving, None
        self._ring.send(step, self._digest, torch.empty(0) if leaving is None else leaving)
        if self._passage.stage.first:
            self._unknown.append(Unknown(step, self._digest, work.sample_slots, work.positions))

    def _forget(self) -> None:
        """Nobody needs the tokens that are still to come."""
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
                self._state.store_sampled(*places, tokens[:count])

    def _note(self, step: int, work: StepWork) -> None:
        """Add the step to the digest of all that this rank was told to compute."""
        self._digest = zlib.crc32(step.to_bytes(8, "little"), self._digest)
        parts = (work.slots, work.starts, work.query_start, work.positions, work.indexes)
        for part in (*parts, *(delta for _, delta in sorted(work.deltas.items()))):
            self._digest = zlib.crc32(part.tobytes(), self._digest)


def steps_of(comm: Comm, model: Network, state: DeviceBatch) -> WholeSteps:
    """Those of the rank that ``comm`` connects with others."""
    if model.passage is None:
        return WholeSteps()
    assert isinstance(comm, StagedComm)
    return StageSteps(comm.ring, model.passage, model, state)
