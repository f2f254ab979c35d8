"""Waits for shared prefixes: of prompts that begin alike and arrive together, one computes the shared part first.

Without this, all that fit into one step would compute the same tokens side by side. A sequence waits only for one that
has a slot and precedes it in the order, which gets its tokens first in any case. It waits only for so many tokens that
one extra step costs less, and never twice for the same ones, since planned blocks can be found. So the number of its
waits is bounded by the length of its prompt, there are no cycles, and a wait ends when the other sequence is preempted
or ends.
"""

from __future__ import annotations

from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.request import Sequence

LEAST_SHARE = 1 / 32
"""Part of the token budget that is worth a wait: 256 tokens of 8192. An H200 computes as many in the time of a step of
one token."""


def awaits(replica: ReplicaBase, sequence: Sequence, num_found: int) -> bool:
    """Whether a running sequence that precedes a waiting one is about to compute its next blocks, beyond
    ``num_found``."""
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
