"""Placement: chooses the replica on which a sequence runs, and what is pulled there before it does."""

from __future__ import annotations

import numpy as np

from pagebus.actors.scheduler.core.lending import Lending
from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.fleet.roles import Roles
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.replica.prefix_match import Offer, offer_of
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

_NEVER = 2**62
"""The load of a replica that is not considered (again)."""


def choose(sequence: Sequence, fleet: Fleet, able: Rows, pulls: Pulls) -> tuple[Replica, Offer] | None:
    """The replica, of those ``able`` to take the sequence now, that gives it its first token soonest; None if none is
    able.

    The longest cached prefix wins, and load decides between equals, both in tokens: a cached token is one less to
    compute, and a replica's load is the number of tokens ahead. So a short prefix that all requests share does not pile
    them onto one replica. Ties go to the replica that joined first.

    Only replicas that hold tokens of the sequence are asked how many, in order of load, as long as these can outweigh
    the load. Of the others, the least loaded one with room is the best. Blocks that a replica can pull from another
    count as cached there, less what it costs to wait for them.
    """
    priority_class, num_tokens = sequence.request.priority_class, len(sequence.tokens)
    lending = Lending(sequence, fleet, pulls)
    load = np.where(able, fleet.load[priority_class], _NEVER)
    best: tuple[int, int, Offer] | None = None
    holders = np.array(fleet.holders(sequence, able), np.intp)
    for row in holders[np.argsort(load[holders], kind="stable")].tolist():
        waits = int(load[row]) + num_tokens
        if best is None or _may_save(sequence, fleet, row, waits - best[0] + (row > best[1])):
            best = _better(best, waits, row, _offer(fleet.replicas[row], sequence, lending))
        load[row] = _NEVER
    load[fleet.room < fleet.blocks_needed(sequence)] = _NEVER
    while (least := int(load.min())) < _NEVER and (
        best is None or (least <= best[0] and least + num_tokens - lending.most_tokens <= best[0])
    ):
        row = int(load.argmin())
        offer = _offer(fleet.replicas[row], sequence, lending)
        best = _better(best, least + num_tokens, row, offer)
        if offer is not None:
            break
        load[row] = _NEVER
    return None if best is None else (fleet.replicas[best[1]], best[2])


def send_ahead(lender: Replica, fleet: Fleet, pulls: Pulls, roles: Roles) -> None:
    """Have decode replicas pull what a prefill replica's last plan computes of prompts that it has not computed to the
    end, where that pays: as for a sequence that waits, but none does."""
    for sequence, target in roles.sent_ahead(lender, pulls):
        fleet.refresh()  # the lender's plan lists the blocks that it computes, the pulls before have taken others
        offer = _offer(target, sequence, Lending(sequence, fleet, pulls))
        if offer is None or offer.loan is None or offer.loan.saved_tokens <= 0 or not offer.loan.num_blocks:
            continue
        pulls.begin(target, offer.loan, offer.cached_blocks + offer.windowed.cached, fleet.named)
        for name in (*offer.loan.lenders, target.name):
            fleet.touch(fleet.named(name))


def _offer(replica: Replica, sequence: Sequence, lending: Lending) -> Offer | None:
    offer = offer_of(replica, sequence)
    return None if offer is None else lending.lengthen(offer, replica)


def _better(
    best: tuple[int, int, Offer] | None, waits: int, row: int, offer: Offer | None
) -> tuple[int, int, Offer] | None:
    """The better of the best candidate so far (tokens ahead, row, offer) and a new one."""
    if offer is None:
        return best
    cost = waits - offer.saved_tokens
    return (cost, row, offer) if best is None or (cost, row) < best[:2] else best


def _may_save(sequence: Sequence, fleet: Fleet, row: int, num_tokens: int) -> bool:
    """Whether the replica may hold this many tokens of the sequence. False is certain."""
    replica, leader, swapped = fleet.replicas[row], sequence.leader, sequence.swapped
    if replica.name in (leader and leader.replica, swapped and swapped.replica):
        return True
    last = -(-num_tokens // replica.block_size) - 1  # the block that a prefix as long as that ends with
    most = min(len(sequence.hashes), (len(sequence.tokens) - 1) // replica.block_size)  # one token is always computed
    if last < 0 or last >= most:
        return last < 0
    if replica.window.num_tokens:  # what lies behind it may be gone
        return True
    if replica.index.find(sequence.hashes[0]) is None:  # then all of it is loaded from the host, which takes time
        return num_tokens <= most * replica.block_size - replica.host_tier.cost_tokens(most)
    return fleet.lists(row, sequence.hashes[last])
