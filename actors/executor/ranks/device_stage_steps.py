"""The steps of a stage on a GPU: as on a CPU, but what enters and leaves is copied beside other work of the host.

Messages lie in page-locked memory. What arrives is copied to where passes begin, on the stream of the steps, and what a
step leaves is copied back on it; so passes may be replayed from graphs, and no copy overtakes one. The device thread
waits for what arrives before it launches a step. What leaves is sent by the thread that waits for the step's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from pagebus.actors.executor.batch.device_batch import DeviceBatch
from pagebus.actors.executor.batch.layout import aligned
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.models.network import Network
from pagebus.actors.executor.models.passage import Passage
from pagebus.actors.executor.ranks.ring import Ring
from pagebus.actors.executor.ranks.stage_steps import Departure, StageSteps, WholeSteps
from pagebus.actors.executor.ranks.staged_comm import StagedComm
from pagebus.bus.messages import Int32Array


class DeviceStageSteps(StageSteps):
    """Those of one rank. ``waiting``: a context in which it waits for others."""

    def __init__(
        self, ring: Ring, passage: Passage, model: Network, state: DeviceBatch,
        waiting: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(ring, passage, model, state)
        self._waiting, self._pinned = waiting, model.parameters.device.type == "cuda"
        if self._pinned:
            ring.pin()
        if passage.stage.first:  # the first time something is compiled
            nowhere = np.array([-1], np.int32)
            self._store(np.zeros(1, np.int32), nowhere, torch.zeros(1, dtype=torch.int32))

    def _take(self, step: int, digest: int) -> torch.Tensor:
        if self._waiting is None or self._ring.has_message:
            return super()._take(step, digest)
        with self._waiting():
            return super()._take(step, digest)

    def end(self, step: int, work: StepWork, sampled: torch.Tensor | None) -> Departure | None:
        """As of :class:`WholeSteps`."""
        return self._departure(step, work, self._left())

    def _left(self) -> torch.Tensor | None:
        leaving = super()._left()
        if leaving is None:
            return None
        host = torch.empty(leaving.shape, dtype=leaving.dtype, pin_memory=self._pinned)
        return host.copy_(leaving, non_blocking=True)

    def _store(self, slots: Int32Array, positions: Int32Array, tokens: torch.Tensor) -> None:
        count, device = len(slots), self._model.parameters.device
        told = torch.empty((3, aligned(count)), dtype=torch.int32, pin_memory=self._pinned)
        for row, values in zip(told.numpy(), (slots, positions, tokens.numpy()), strict=True):
            row[:count] = values
        self._state.store_sampled(*told.to(device, non_blocking=True)[:, :count].unbind())


def steps_of(
    comm: Comm, model: Network, state: DeviceBatch, waiting: Callable[[], AbstractContextManager[None]] | None = None
) -> WholeSteps:
    """Those of the rank that ``comm`` connects with others. ``waiting``: a context in which it waits for these."""
    if model.passage is None:
        return WholeSteps()
    assert isinstance(comm, StagedComm)
    if model.parameters.device.type == "cpu":
        return StageSteps(comm.ring, model.passage, model, state)
    return DeviceStageSteps(comm.ring, model.passage, model, state, waiting)
