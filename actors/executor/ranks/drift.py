"""The alarm for ranks that no longer compute the same: at each step they compare what they did."""

from __future__ import annotations

import zlib

from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.agreement import Agreement
from pagebus.bus.messages import Int32Array


class DriftCheck:
    """Digests of all steps of one rank, each of which includes the ones before it.

    A digest travels with the tokens that ranks sample. Steps that sample none have an exchange for it: a result of
    rank 0 then proves that every rank has taken the plan, so that the log of steps may be trimmed by results alone.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._digest = agreement, 0

    def begin(self, step: int, work: StepWork) -> None:
        """Note what ``step`` is to compute: rows, tokens, positions, and the settings and tables of their slots."""
        if self._agreement.comm.size == 1:
            return
        self._add(work.slots, work.starts, work.query_start, work.positions, work.indexes)
        for _, delta in sorted(work.deltas.items()):
            self._add(delta)
        self._agreement.begin(step, self._digest)

    def end(self, tokens: Int32Array) -> None:
        """Note the step's tokens, and compare, unless that was done when they were sampled.

        Raises:
            EngineError: a rank was at another step, was told something else or has sampled other tokens before.
        """
        self._agreement.settle()
        self._add(tokens)

    def _add(self, *parts: Int32Array) -> None:
        for part in parts:
            self._digest = zlib.crc32(part.tobytes(), self._digest)
