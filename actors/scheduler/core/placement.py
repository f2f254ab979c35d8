"""On which replica a sequence runs."""

from __future__ import annotations

import numpy as np

from pagebus.actors.scheduler.core.fleet import Fleet, Rows
from pagebus.actors.scheduler.replica.prefix_match import Offer, offer_of
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

_NEVER = 2**62
"""The load of a replica that is not asked, or not again."""


def choose(sequence: Sequence, fleet: Fleet, able: Rows) -> tuple[Replica, Offer] | None:
    """The replica where the sequence gets its first token soonest, of those ``able`` to take it now; None if none is.

    The longest cached prefix wins, and load decides between equals, measured in the same unit: a cached token is a
    token less to compute, and a replica's load is how many tokens come first. So a short prefix that all requests
    share does not pile them onto one replica. Ties go to the replica that joined first.

    Only replicas that have something of the sequence are asked how much, in the order of their loads, as long as that
    can make up for the load. Of all others the least loaded one with room is the best, without asking.
    """
    priority_class, num_tokens = sequence.request.priority_class, len(sequence.tokens)
    load = np.where(able, fleet.load[priority_class], _NEVER)
    best: tuple[int, int, Offer] | None = None
    holders = np.array(fleet.holders(sequence, able), np.intp)
    for row in holders[np.argsort(load[holders], kind="stable")].tolist():
        waits = int(load[row]) + num_tokens
        if best is None or _may_save(sequence, fleet, row, waits - best[0] + (row > best[1])):
            best = _better(best, waits, row, offer_of(fleet.replicas[row], sequence))
        load[row] = _NEVER
    load[fleet.room < -(-num_tokens // fleet.replicas[0].block_size)] = _NEVER
    while (least := int(load.min())) < _NEVER and (best is None or least + num_tokens <= best[0]):
        row = int(load.argmin())
        offer = offer_of(fleet.replicas[row], sequence)
        best = _better(best, least + num_tokens, row, offer)
        if offer is not None:
            break
        load[row] = _NEVER
    return None if best is None else (fleet.replicas[best[1]], best[2])


def _better(
    best: tuple[int, int, Offer] | None, waits: int, row: int, offer: Offer | None
) -> tuple[int, int, Offer] | None:
    """The best so far (tokens that come first, row, offer), or a new one in its place."""
    if offer is None:
        return best
    cost = waits - offer.saved_tokens
    return (cost, row, offer) if best is None or (cost, row) < best[:2] else best


def _may_save(sequence: Sequence, fleet: Fleet, row: int, num_tokens: int) -> bool:
    """Whether the replica may have so many tokens of the sequence; False is certain."""
    replica, leader, swapped = fleet.replicas[row], sequence.leader, sequence.swapped
    if replica.name in (leader and leader.replica, swapped and swapped.replica):
        return True
    last = -(-num_tokens // replica.block_size) - 1  # the block that a prefix as long as that ends with
    most = min(len(sequence.hashes), (len(sequence.tokens) - 1) // replica.block_size)  # one token is always computed
    if last < 0 or last >= most:
        return last < 0
    if sequence.hashes[0] not in replica.index.blocks:  # then all of it is loaded from the host, which takes time
        return num_tokens <= most * replica.block_size - replica.host_tier.cost_tokens(most)
    return fleet.lists(row, sequence.hashes[last])
