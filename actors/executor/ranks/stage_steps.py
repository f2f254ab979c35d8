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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.models.network import Network
from pagebus.actors.executor.models.passage import Passage
from pagebus.actors.executor.ranks.ring import Ring
from pagebus.bus.messages import Int32Array, StepPlan


@dataclass(slots=True)
class Unknown:
    """A step whose sampled tokens have not come back: they belong to ``slots`` at ``positions`` [N]."""

    step: int
    digest: int
    slots: Int32Array
    positions: Int32Array

    def forget(self) -> None:
        """Nobody needs its tokens."""
        self.slots = self.positions = np.empty(0, np.int32)


Departure: TypeAlias = Callable[[Int32Array], None]
"""What sends on what a step has come to, once the device has computed it; gets the tokens that it sampled."""


class WholeSteps:
    """Those of an executor that is no pipeline. All methods belong to the device thread."""

    def begin(self, plan: StepPlan, scheduler_epoch: int, work: StepWork) -> float:
        """Wait for what the step of ``plan`` begins with; returns the seconds that this took. Another scheduler's first
        plan finds an empty batch.

        Raises:
            EngineError: it did not come in time; a rank is lost or was told something else.
        """
        return 0.0

    def end(self, step: int, work: StepWork, sampled: torch.Tensor | None) -> Departure | None:
        """Pass on what the step has come to; on a GPU what does that when it is there."""
        return None


class StageSteps(WholeSteps):
    """Those of one rank of a pipeline, whose tokens are in ``state``. Here it computes on a CPU."""

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
        payload = self._take(step, self._digest)
        if not len(work.slots):
            return
        model = self._model
        dtype, hidden = model.parameters.dtype, model.config.hidden_size
        if len(payload) != work.num_tokens * hidden * dtype.itemsize:
            raise EngineError(f"step {step}: {len(payload)} bytes were passed on for {work.num_tokens} tokens")
        self._passage.bring(payload.view(dtype).view(work.num_tokens, hidden))

    def _take(self, step: int, digest: int) -> torch.Tensor:
        return self._ring.take(step, digest)

    def end(self, step: int, work: StepWork, sampled: torch.Tensor | None) -> Departure | None:
        """As of :class:`WholeSteps`."""
        tokens = np.empty(0, np.int32) if sampled is None else sampled[: len(work.positions)].numpy().copy()
        self._departure(step, work, self._left())(tokens)
        return None

    def _left(self) -> torch.Tensor | None:
        """The states [T, H] that the step leaves for the next stage, on the host or on their way to it."""
        return self._passage.take()

    def _departure(self, step: int, work: StepWork, leaving: torch.Tensor | None) -> Departure:
        """Sends on what the step that was begun last has computed: states, or tokens from the last stage."""
        digest, count, stage = self._digest, len(work.positions), self._passage.stage
        if stage.first:
            self._unknown.append(Unknown(step, digest, work.sample_slots, work.positions))

        def send(tokens: Int32Array) -> None:
            told = torch.from_numpy(tokens[:count]) if stage.last else leaving
            self._ring.send(step, digest, torch.empty(0) if told is None else told)

        return send

    def _forget(self) -> None:
        """Nobody needs the tokens that are still to come."""
        for each in self._unknown:
            each.forget()

    def _take_tokens(self, slots: Int32Array) -> None:
        """Store tokens in their slots: those that have come, and all that these ``slots`` wait for."""
        needed = max((n for n, each in enumerate(self._unknown, 1) if np.isin(each.slots, slots).any()), default=0)
        while self._unknown and (needed > 0 or self._ring.has_message):
            needed -= 1
            each = self._unknown.popleft()
            tokens = self._take(each.step, each.digest).view(torch.int32)
            if count := len(each.slots):
                self._store(each.slots, each.positions, tokens[:count])

    def _store(self, slots: Int32Array, positions: Int32Array, tokens: torch.Tensor) -> None:
        """Put ``tokens`` [N], which are on the host, into the ``slots`` at these ``positions``."""
        self._state.store_sampled(torch.from_numpy(slots.copy()), torch.from_numpy(positions.copy()), tokens)

    def _note(self, step: int, work: StepWork) -> None:
        """Add the step to the digest of all that this rank was told to compute."""
        self._digest = zlib.crc32(step.to_bytes(8, "little"), self._digest)
        parts = (work.slots, work.starts, work.query_start, work.positions, work.indexes)
        for part in (*parts, *(delta for _, delta in sorted(work.deltas.items()))):
            self._digest = zlib.crc32(part.tobytes(), self._digest)
