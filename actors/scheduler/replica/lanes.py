"""Which rows a step of a pipeline of stages may have, so that all stages are busy.

A sequence's next token is computed from its newest, which the first stage has only when the step that samples it has
passed all stages. So decodes are divided into *lanes*, as many as there are stages: while one lane is in the last
stage, the others are in those before it. Nobody belongs to a lane for good: each step takes its share of the sequences
that are not in flight, those first that have waited longest. Chunks of prompts need no token, and follow each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.replica.slots import SlotTable
from pagebus.bus.messages import Int32Array


def hold_back(table: SlotTable, behind: Int32Array, stages: int, num_in_flight: int) -> Int32Array:
    """``behind`` [slots] without the rows that the next step must not have: those whose newest token is in flight, and
    decodes beyond the step's share. While ``num_in_flight`` steps keep all stages busy, it has no decodes without a
    prompt: they gather to a full share meanwhile."""
    known: NDArray[np.bool_] = table.known == table.total
    behind = np.where(known, behind, 0)
    decodes = np.flatnonzero(behind == 1)
    if not len(decodes):
        return behind
    if num_in_flight >= stages and not np.count_nonzero(behind > 1):
        behind[decodes] = 0
        return behind
    num_running = len(decodes) + len(table) - np.count_nonzero(known & (table.ids != 0))
    share = -(-num_running // stages)
    if len(decodes) > share:
        longest = np.argsort(table.planned[decodes], kind="stable")
        behind[decodes[longest[share:]]] = 0
    return behind
