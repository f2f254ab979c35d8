"""Preemption to a neighbour: a sequence that must give its blocks up continues at once on a replica that has room. Its
full blocks are pulled from where it was (:mod:`pagebus.actors.scheduler.moves.pulls`).

It leaves its slot like any preempted sequence, and is placed like any waiting one. This module only decides that its
blocks are not copied to the host, because the neighbour is quicker. Its place is chosen when its last results have
arrived. If the room is gone by then, the sequence is computed again, as without a host tier. Meanwhile its old replica
may give away the last of its blocks; these are computed again, too.
"""

from __future__ import annotations

import numpy as np

from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.fleet.roles import Roles
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.replica.moves.leaver import Leaver
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence


class Neighbours:
    """Finds replicas that take over sequences preempted for want of blocks. ``going``: sequences on their way, by id,
    each with the names of the replica that it has left and of the one that had room for it."""

    def __init__(self, pulls: Pulls, roles: Roles) -> None:
        self.going: dict[int, tuple[Sequence, str, str]] = {}
        self._pulls, self._roles = pulls, roles
        self._fleet = Fleet()

    def assign(self, fleet: Fleet) -> None:
        """The set of replicas has changed. Each calls :meth:`takes` before it preempts a sequence."""
        self._fleet, names = fleet, {replica.name for replica in fleet.replicas}
        self.going = {number: each for number, each in self.going.items() if names.issuperset(each[1:])}
        for replica in fleet.replicas:
            replica.ask_before_leaving(self.takes if fleet.lends else None)

    def takes(self, name: str, leaver: Leaver) -> bool:
        """Whether a sequence that is preempted on the replica of this name continues elsewhere. Its room there then
        counts as taken for sequences that leave after it."""
        self.going = {number: each for number, each in self.going.items() if each[0].is_queued}
        lender, sequence = self._fleet.named(name), leaver.sequence
        if sequence.suspect or sequence.scores_prompt or lender.kept.num_tokens:
            return False  # with a window nothing is worth a pull without the last blocks, which others take at once
        target = self._with_room(lender, leaver)
        if target is None or leaver.cost_tokens <= self._cost_tokens(lender, target, leaver):
            return False
        self.going[sequence.id] = sequence, lender.name, target.name
        return True

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence that has lost its slot was to continue elsewhere."""
        return sequence.id in self.going

    def admitted(self, sequence: Sequence) -> None:
        """A sequence has a slot again."""
        self.going.pop(sequence.id, None)

    def narrow(self, sequence: Sequence, able: Rows) -> Rows:
        """The ``able`` replicas without the one that the sequence has just left, where it would displace others at
        once. All of them, once the others have no room."""
        _, left, _ = self.going[sequence.id]
        others = able & (self._fleet.room >= self._fleet.blocks_needed(sequence))
        others[self._fleet.row(left)] = False
        if others.any():
            return others
        del self.going[sequence.id]
        return able

    def _cost_tokens(self, lender: Replica, target: Replica, leaver: Leaver) -> float:
        """Tokens that the target could compute until the sequence continues there."""
        if leaver.num_pages > self._pulls.room(lender, target):
            return leaver.num_computed
        link = self._pulls.link(lender, target)
        return leaver.num_computed - max(0, link.saves(leaver.num_pages, leaver.num_full, target.ahead()))

    def _with_room(self, lender: Replica, leaver: Leaver) -> Replica | None:
        """The least loaded of the replicas that can take the sequence over and have room for it."""
        fleet, request = self._fleet, leaver.sequence.request
        fleet.refresh()  # the lender's row, in the midst of a plan, is outdated by that
        rows = fleet.open[request.priority_class] & fleet.can_hold(leaver.sequence)
        rows &= fleet.room >= fleet.blocks_needed(leaver.sequence)
        if self._roles.is_on:
            rows &= self._roles.decodes
        for row in sorted(np.flatnonzero(rows).tolist(), key=fleet.load[request.priority_class].__getitem__):
            replica = fleet.replicas[row]
            if self._pulls.can_lend(lender, replica) and self._has_room(replica, leaver):
                return replica
        return None

    def _has_room(self, replica: Replica, leaver: Leaver) -> bool:
        """Whether a replica has slots and blocks for it, besides what those on their way there need."""
        sequence, queued = leaver.sequence, [each for each, _, name in self.going.values() if name == replica.name]
        digest = sequence.request.digest
        if digest and not replica.adapters.may_run(digest):
            return False
        slots = sequence.num_slots + sum(each.num_slots for each in queued)
        needed = replica.blocks_to_admit(sequence.request, leaver.num_computed + 1)
        needed += replica.adapters.num_needed(digest)
        needed += sum(replica.blocks_to_admit(each.request, len(each.tokens)) for each in queued)
        return replica.slots.num_free_slots >= slots and replica.room() >= needed
