"""On which replica a sequence runs."""

from __future__ import annotations

from collections.abc import Iterable

from actors.scheduler.replica import Offer, Replica
from actors.scheduler.sequence import Sequence


def choose(sequence: Sequence, replicas: Iterable[Replica]) -> tuple[Replica, Offer] | None:
    """The replica where the sequence gets its first token soonest, of those that can take it now; None if none can.

    The longest cached prefix wins, and load decides between equals, measured in the same unit: a cached token is a
    token less to compute, and a replica's load is how many tokens come first. So a short prefix that all requests
    share does not pile them onto one replica. Ties go to the first replica given.
    """
    best: tuple[Replica, Offer] | None = None
    level, num_tokens = sequence.request.level, len(sequence.tokens)
    least = 0
    for replica in replicas:
        offer = replica.offer(sequence)
        if offer is None:
            continue
        cost = replica.load(level) + num_tokens - offer.saved_tokens
        if best is None or cost < least:
            best, least = (replica, offer), cost
    return best
