"""The alarm for ranks that no longer compute the same: at each step they compare what they did."""

from __future__ import annotations

import zlib

import numpy as np

from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.device.agreement import Agreement
from pagebus.bus.messages import Int32Array, StepPlan


class DriftCheck:
    """Digests of all steps of one rank, each of which includes the ones before it.

    A digest travels with the tokens that ranks sample. Steps that sample none have an exchange for it: a result of
    rank 0 then proves that every rank has taken the plan, so that the log of steps may be trimmed by results alone.
    On a GPU, where the next step begins before a step's tokens are on the host, digests do not include tokens: all
    ranks choose these from the same bytes.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._digest = agreement, 0

    def begin(self, plan: StepPlan, work: StepWork, copied_step: int) -> None:
        """Note what ``plan`` is to compute: rows, tokens, positions, and the settings, tables and adapters of their
        slots. ``copied_step``: up to which step this rank's copies between the tiers are done."""
        if self._agreement.comm.size == 1:
            return
        self._add(work.slots, work.starts, work.query_start, work.positions, work.indexes)
        for _, delta in sorted(work.deltas.items()):
            self._add(delta)
        self._digest = zlib.crc32(_adapters(plan), self._digest)
        work.agree_on(np.array([plan.step, self._digest, copied_step]).astype(np.uint32).view(np.int32))

    def settle(self, *, sampled: bool) -> None:
        """Compare, unless that was done when tokens were ``sampled``.

        Raises:
            EngineError: on a CPU: a rank was at another step, was told something else or has sampled other tokens
                before.
        """
        if not sampled:
            self._agreement.settle()

    def note(self, tokens: Int32Array) -> None:
        """These were sampled."""
        if self._agreement.comm.size > 1:
            self._add(tokens)

    def _add(self, *parts: Int32Array) -> None:
        for part in parts:
            self._digest = zlib.crc32(part.tobytes(), self._digest)


def _adapters(plan: StepPlan) -> bytes:
    """Those that come and go, those that get blocks, and those of new sequences, by their digests."""
    placed = [f"{each.digest} {each.num_blocks}" for each in plan.placed_adapters]
    placed += map(str, plan.adapter_blocks.tolist())
    found = [each.digest for each in plan.loaded_adapters], plan.dropped_adapters, placed
    return "\n".join(" ".join(each) for each in (*found, [new.adapter for new in plan.new_sequences])).encode()
