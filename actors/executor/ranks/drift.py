"""The alarm for ranks that no longer compute the same: after each step they compare what they did."""

from __future__ import annotations

import zlib

import torch

from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError
from pagebus.bus.messages import Int32Array


class DriftCheck:
    """Digests of all steps of one rank, each of which includes the ones before it.

    The exchange is there in steps without rows too: a result of rank 0 then proves that every rank has taken the plan,
    so that the log of steps may be trimmed by results alone.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._digest = comm, 0

    def check(self, step: int, work: StepWork, tokens: Int32Array) -> None:
        """Compare with the other ranks what ``step`` had them compute, and its ``tokens``.

        Raises:
            EngineError: a rank was at another step, computed something else or sampled other tokens.
        """
        if self._comm.size == 1:
            return
        for part in (work.slots, work.starts, work.query_start, tokens):
            self._digest = zlib.crc32(part.tobytes(), self._digest)
        told = self._comm.all_gather(torch.tensor([step, self._digest]))
        if not torch.equal(told, told[:1].expand_as(told)):
            each = (f"rank {rank}: step {at}, {digest:08x}" for rank, (at, digest) in enumerate(told.tolist()))
            raise EngineError(f"the ranks have drifted apart ({', '.join(each)})")
