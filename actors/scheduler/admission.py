"""Which waiting sequences get a slot now, and where."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from actors.scheduler.order import INTERACTIVE, JOB
from actors.scheduler.placement import choose
from actors.scheduler.replica import Offer, Replica
from actors.scheduler.sequence import Sequence


def admit(waiting: Iterable[Sequence], replicas: Collection[Replica]) -> list[Sequence]:
    """Give slots to waiting sequences, strictly in order; returns those that got one, still to be taken off the queue.

    On a replica where a sequence could run but has no room now, or was preempted and has not landed, none behind it
    gets in. Jobs make room for interactive sequences: they are in ``preempted`` of their replicas then.
    """
    level, admitted = INTERACTIVE, []
    candidates = [replica for replica in replicas if replica.is_open(level)]
    for sequence in waiting:
        if sequence.request.level != level:
            level = sequence.request.level
            candidates = [replica for replica in candidates if replica.is_open(level)]
        if not candidates:
            break
        if not sequence.ready:
            candidates = [replica for replica in candidates if replica is not sequence.replica]
            continue
        able = [replica for replica in candidates if replica.can_hold(sequence)]
        chosen = choose(sequence, able) or _displace_jobs(sequence, able)
        if chosen is None:
            candidates = [replica for replica in candidates if replica not in able]
            continue
        replica, offer = chosen
        replica.bind(sequence, offer)
        admitted.append(sequence)
        if not replica.is_open(level):
            candidates.remove(replica)
    return admitted


def _displace_jobs(sequence: Sequence, able: Iterable[Replica]) -> tuple[Replica, Offer] | None:
    """A place that jobs give up for an interactive sequence."""
    if sequence.request.level == JOB:
        return None
    for replica in able:
        offer = replica.displace_jobs(sequence)
        if offer is not None:
            return replica, offer
    return None
