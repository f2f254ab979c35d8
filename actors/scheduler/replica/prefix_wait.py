"""Prompts that begin alike and come together: the first computes what they share, the others wait until it is planned.

Without this, all that fit into one step would compute the same tokens side by side. One waits only for a sequence that
has a slot and goes before it, so that one gets its tokens first in any case; for at least so many tokens that one step
more costs less; and not again for the same ones, since what is planned can be found. So it waits no more often than its
prompt is long, nobody waits for itself by way of others, and when the sequence that it waits for is preempted or ends,
it does not wait any more.
"""

from __future__ import annotations

from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.request import Sequence

LEAST_SHARE = 1 / 32
"""Part of the token budget that is worth a wait: 256 tokens of 8192. An H200 computes as many in the time that a step
of one token takes."""


def awaits(replica: ReplicaBase, sequence: Sequence, num_found: int) -> bool:
    """Whether a running sequence that goes before a waiting one is about to compute its next blocks, behind the
    ``num_found`` that are there already."""
    table, size = replica.slots, replica.block_size
    least = max(1, int(replica.budget * LEAST_SHARE) // size)
    last = num_found + least - 1
    most = min(len(sequence.hashes), (len(sequence.tokens) - 1) // size)  # one token is always computed
    if last >= most or table.backlog(JOB) < least * size:
        return False
    wanted, key = sequence.hashes[last], sequence.key
    others = map(table.at, (table.total - table.computed >= size).nonzero()[0].tolist())
    return any(
        last < len(other.hashes)
        and other.hashes[last] == wanted
        and other.key < key
        and table.computed[other.slot] <= last * size
        for other in others
    )
