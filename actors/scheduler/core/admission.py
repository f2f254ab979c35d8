"""Admission: gives slots to waiting sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from pagebus.actors.scheduler.core.adapter_turn import AdapterTurn
from pagebus.actors.scheduler.core.candidates import Candidates
from pagebus.actors.scheduler.core.placement import choose
from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.fleet.neighbours import Neighbours
from pagebus.actors.scheduler.fleet.roles import Roles
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.prefix_match import Offer, displace_jobs
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

PREFIX, DISK, PULL, ROLE = "prefix", "disk", "pull", "role"
MOST_WAITING = {PREFIX: 64, DISK: 256, PULL: 256, ROLE: 64}
"""Admission stops for this plan after this many sequences that wait for another's prefix, for a disk, for blocks of
another replica, or for a replica of their role."""


def admit(
    waiting: Iterable[Sequence], fleet: Fleet, pulls: Pulls, roles: Roles, neighbours: Neighbours, most_full: int
) -> list[Sequence]:
    """Give slots to waiting sequences, strictly in order, until ``most_full`` pulls are full (:attr:`Pulls.num_full`).
    Returns those admitted; the caller removes them from the queue.

    If a sequence could run on a replica but has no room there now, or was preempted in flight there, no later sequence
    is admitted to that replica. Jobs are preempted for interactive sequences and are then in their replicas'
    ``preempted``. Sequences that wait for a shared prefix (:mod:`pagebus.actors.scheduler.replica.prefix_wait`) may be
    overtaken, but only within the room of one step. So may those whose adapter is not on the device
    (:mod:`pagebus.actors.scheduler.core.adapter_turn`), those whose prefix is read from a disk or pulled from another
    replica, and those that wait for a replica of their role (:mod:`pagebus.actors.scheduler.fleet.roles`). Those that
    are handed over from a prefill replica need a slot and blocks, but no place in line behind the prompts of others.
    """
    fleet.refresh()
    adapters, candidates = AdapterTurn(fleet), Candidates(fleet, roles.on_their_way())
    admitted, num_waiting = [], Counter[str]()
    for sequence in waiting:
        rows = candidates.of(sequence)
        if candidates.is_over:
            break
        if not np.count_nonzero(rows) or (sequence.request.adapter is not None and adapters.must_wait(sequence, rows)):
            if adapters.is_over:
                break
            continue
        is_pulling = sequence.pulls is not None and pulls.is_pulling(sequence)
        able = rows  # while it is pulled for, nobody looks where it may run
        if not is_pulling or sequence.request.adapter is not None:
            able = _able(sequence, rows, fleet, pulls, roles, neighbours)
        if sequence.request.adapter is not None and np.count_nonzero(able):
            able = adapters.having(sequence, able)
            if adapters.is_over:
                break
        if not np.count_nonzero(able):  # those behind do not wait for it
            reason = ROLE if roles.is_on else None
        elif is_pulling:
            reason = PULL
        elif chosen := choose(sequence, fleet, able, pulls) or _displace_jobs(sequence, fleet, able):
            replica, offer = chosen
            reason = _waits_for(sequence, replica, offer, fleet, pulls)
            if reason is None:
                _bind(sequence, replica, offer, fleet)
                admitted.append(sequence)
                candidates.taken(fleet.row(replica.name))
        else:
            candidates.close(able)
            continue
        if reason is not None:
            num_waiting[reason] += 1
            if num_waiting[reason] == MOST_WAITING[reason] or pulls.num_full >= most_full:
                break
    return admitted


def _able(
    sequence: Sequence, candidates: Rows, fleet: Fleet, pulls: Pulls, roles: Roles, neighbours: Neighbours
) -> Rows:
    """Those of the candidates on which the sequence may run at all."""
    holds = fleet.can_hold(sequence)
    able = candidates & holds
    if sequence.suspect:
        able &= _without_suspect(fleet)
    able = roles.narrow(sequence, able, holds, pulls) if roles.is_on else able
    return neighbours.narrow(sequence, able) if neighbours.has(sequence) else able


def _waits_for(sequence: Sequence, replica: Replica, offer: Offer, fleet: Fleet, pulls: Pulls) -> str | None:
    """What the sequence waits for without a slot, if anything. Starts the read from the disk, or the pull, that its
    offer contains."""
    if offer.loan is not None:
        if offer.loan.saved_tokens > 0:
            kept = offer.cached_blocks + offer.windowed.cached
            sequence.wait_for_pulls(pulls.begin(replica, offer.loan, kept, fleet.named))
            for name in (*offer.loan.lenders, replica.name):
                fleet.touch(fleet.named(name))
            fleet.refresh()
            return PULL
        for part in offer.loan.parts:
            pulls.link(fleet.named(part.lender), replica, hosts=part.hosts).decline(part.num_tokens)
    if offer.disk:
        replica.disk_tier.read(sequence, offer.disk, offer.host_blocks + offer.windowed.hosts, offer.disk_tokens)
        fleet.touch(replica)
        fleet.refresh()
    if replica.disk_tier.is_reading(sequence):
        return DISK
    return PREFIX if offer.awaits else None


def _bind(sequence: Sequence, replica: Replica, offer: Offer, fleet: Fleet) -> None:
    """Give the sequence a slot of the replica; its blocks in another replica's host tier are released."""
    if sequence.swapped is not None and sequence.swapped.replica != replica.name:
        fleet.named(sequence.swapped.replica).host_tier.forget(sequence)
    replica.bind(sequence, offer)
    sequence.wait_for_pulls(None)
    fleet.touch(replica)
    fleet.refresh()


def _without_suspect(fleet: Fleet) -> Rows:
    return np.array([not replica.tries_suspect for replica in fleet.replicas], bool)


def _displace_jobs(sequence: Sequence, fleet: Fleet, able: Rows) -> tuple[Replica, Offer] | None:
    """A replica on which preempting jobs makes room for an interactive sequence."""
    if sequence.request.priority_class == JOB:
        return None
    for row in np.flatnonzero(able).tolist():
        replica = fleet.replicas[row]
        if not replica.slots.num_jobs:
            continue
        fleet.touch(replica)
        offer = displace_jobs(replica, sequence)
        if offer is not None:
            return replica, offer
    return None
