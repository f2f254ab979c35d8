"""Which waiting sequences get a slot now, and where."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pagebus.actors.scheduler.core.fleet import Fleet, Rows
from pagebus.actors.scheduler.core.placement import choose
from pagebus.actors.scheduler.order import INTERACTIVE, JOB
from pagebus.actors.scheduler.replica.prefix_match import Offer, displace_jobs
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

MOST_AWAITING = 64
"""After so many that await what others compute, nobody else is looked at for the next plan."""


def admit(waiting: Iterable[Sequence], fleet: Fleet) -> list[Sequence]:
    """Give slots to waiting sequences, strictly in order; returns those that got one, still to be taken off the queue.

    On a replica where a sequence could run but has no room now, or was preempted in flight, none behind it
    gets in. Jobs make room for interactive sequences: they are in ``preempted`` of their replicas then. Those that
    await what others compute (:mod:`pagebus.actors.scheduler.replica.prefix_wait`) are passed by those behind them, but
    not for long: what a step has room for.
    """
    fleet.refresh()
    priority_class, admitted, num_awaiting = INTERACTIVE, [], 0
    candidates = fleet.open[priority_class].copy()
    for sequence in waiting:
        if sequence.request.priority_class != priority_class:
            priority_class = sequence.request.priority_class
            candidates &= fleet.open[priority_class]
        if not np.count_nonzero(candidates):
            break
        if not sequence.ready:
            if sequence.replica is not None:
                candidates[fleet.row(sequence.replica)] = False
            continue
        able = candidates & fleet.can_hold(sequence)
        if sequence.suspect:
            able &= _without_suspect(fleet)
            if not np.count_nonzero(able):
                continue  # those behind do not wait for it
        chosen = choose(sequence, fleet, able) or _displace_jobs(sequence, fleet, able)
        if chosen is None:
            candidates &= ~able
            continue
        replica, offer = chosen
        if offer.awaits:
            num_awaiting += 1
            if num_awaiting == MOST_AWAITING:
                break
            continue
        if sequence.swapped is not None and sequence.swapped.replica != replica.name:
            fleet.named(sequence.swapped.replica).host_tier.forget(sequence)
        replica.bind(sequence, offer)
        admitted.append(sequence)
        fleet.touch(replica)
        fleet.refresh()
        row = fleet.row(replica.name)
        candidates[row] &= fleet.open[priority_class, row]
    return admitted


def _without_suspect(fleet: Fleet) -> Rows:
    return np.array([not replica.tries_suspect for replica in fleet.replicas], bool)


def _displace_jobs(sequence: Sequence, fleet: Fleet, able: Rows) -> tuple[Replica, Offer] | None:
    """A place that jobs give up for an interactive sequence."""
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
