"""Adds drafts to the decodes of a step: tokens that the executor guesses, and that the step verifies.

A row gets drafts if the newest result reported some as ready, and if they are expected to be worth their price
(:mod:`pagebus.actors.scheduler.replica.drafts.depth`). They never take anything from other rows: drafts beyond the
sequence's limit, the step's budget or pace, or the free blocks are left out, and the row decodes one token as usual.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagebus.actors.scheduler.replica.slots import Slots
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.bus.messages import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """The decodes of a step for an executor that speculates. ``slots`` [r] are all of the step's, in which decodes with
    drafts now follow those without. ``drafts`` [d] are those of the d decodes; ``earliest`` and ``latest`` [d] bound
    the position of each one's first token."""

    slots: Slots
    drafts: Int32Array
    earliest: Int32Array
    latest: Int32Array

    @property
    def num_plain(self) -> int:
        """How many decodes have no draft; they come first."""
        return len(self.drafts) - int(np.count_nonzero(self.drafts))

    def num_scheduled(self, counts: Int32Array) -> Int32Array:
        """``counts`` [r] of a step without drafts, plus the drafts."""
        widened = counts.copy()
        widened[: len(self.drafts)] += self.drafts
        return widened


def add_drafts(replica: ReplicaBase, slots: Slots, counts: Int32Array, num_decodes: int) -> Drafted | None:
    """Choose drafts for the decodes among a step's rows, whose own blocks are allocated, and allocate blocks for them.
    None: nothing is drafted or looked up, and the executor knows where all decodes begin."""
    table, decodes = replica.slots, slots[:num_decodes]
    looks = not num_decodes or replica.depth.watch.looks()
    if not looks and num_decodes and not np.count_nonzero(table.moved[decodes]):
        replica.depth.none()
        replica.depth.prices.skipped()
        return None
    earliest = table.computed[decodes]
    latest = earliest + table.ahead[decodes]
    wanted = table.drafts[decodes]
    if looks and np.count_nonzero(wanted):
        wanted = np.where(wanted > 0, table.most_drafts[decodes], 0)
        wanted = np.minimum(wanted, table.last[decodes] - latest - 1)
        room = replica.budget - int(counts.sum())
        drafts = replica.depth.choose(decodes, wanted, room, alone=num_decodes == len(slots))
    else:
        replica.depth.none()
        drafts = np.zeros(num_decodes, np.int32)
    if np.count_nonzero(drafts):
        if replica.pacer is not None and not replica.pacer.has_time(table.computed[slots], counts, drafts):
            drafts[:] = 0
        _take_blocks(replica, decodes, latest, drafts)
        order = np.argsort(drafts > 0, kind="stable")
        decodes, drafts, earliest, latest = decodes[order], drafts[order], earliest[order], latest[order]
        slots = slots.copy()
        slots[:num_decodes] = decodes
    table.plan_drafts(decodes, drafts)
    return Drafted(slots, drafts, earliest, latest)


def _take_blocks(replica: ReplicaBase, slots: Slots, latest: Int32Array, drafts: Int32Array) -> None:
    """Allocate the blocks that ``drafts`` need at most; if they are not free, cut the drafts, in place."""
    table, size = replica.slots, replica.block_size
    for row in np.flatnonzero(latest + 1 + drafts > table.capacity[slots]).tolist():
        slot = int(slots[row])
        missing = int(latest[row]) + 1 + int(drafts[row]) - int(table.capacity[slot])
        blocks = -(-missing // size)
        if blocks > replica.num_free:
            drafts[row] -= missing
            continue
        replica.builder.append(table.at(slot), *replica.allocate(blocks))
        table.capacity[slot] += blocks * size
