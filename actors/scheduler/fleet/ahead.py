"""Sends prompts ahead, chunk by chunk: while a prefill replica computes a long prompt, the decode replica that will
probably continue it pulls the finished chunks. When the sequence is handed over, only its last chunk is left to pull.

No sequence waits for these pulls. They bring cached blocks, which are found like any others once the sequence is
placed, so nothing depends on the guess of the replica.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pagebus.actors.scheduler.fleet.fleet import Fleet
from pagebus.actors.scheduler.order import INTERACTIVE
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence


@dataclass(frozen=True, slots=True)
class Sent:
    """The target that was given the chance to pull the blocks of a sequence's first ``num_tokens`` tokens."""

    target: str
    num_tokens: int


class Ahead:
    """The targets of the prompts that each replica computes."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[int, Sent]] = {}

    def due(self, lender: Replica, targets: list[Replica], fleet: Fleet) -> list[tuple[Sequence, Replica]]:
        """Sequences of which the lender's last plan computes further blocks, but not yet the last ones, each with its
        target: the one that has the earlier blocks, or else the one with the least load, these sequences included."""
        table, before, now = lender.slots, self._sent.pop(lender.name, {}), dict[int, Sent]()
        found = []
        halfway = (table.ids != 0) & (table.computed >= lender.block_size) & (table.computed < table.known)
        for slot in np.flatnonzero(halfway).tolist() if targets else []:
            sequence = table.at(slot)
            if sequence.beam_group is not None or sequence.scores_prompt:
                continue
            sent, num_tokens = before.get(sequence.id), int(table.computed[slot])
            target = next((each for each in targets if sent is not None and each.name == sent.target), None)
            if target is None:
                count = Counter(each.target for sent_now in (*self._sent.values(), now) for each in sent_now.values())
                load = fleet.load[INTERACTIVE]
                target = min(targets, key=lambda each: int(load[fleet.row(each.name)]) + count[each.name])
            if sent is None or sent.target != target.name or sent.num_tokens < num_tokens:
                found.append((sequence, target))
            now[sequence.id] = Sent(target.name, num_tokens)
        if now:
            self._sent[lender.name] = now
        return found
