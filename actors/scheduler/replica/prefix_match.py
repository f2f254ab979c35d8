"""Finds what a replica can offer to a waiting sequence: room, and cached tokens."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.scheduler.kv.window_match import Match, match_window
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.actors.scheduler.replica.prefix_wait import awaits
from pagebus.actors.scheduler.replica.prompt_fork import Fork, fork_of
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.request import Sequence, Swapped


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens that a replica with room holds of a sequence: ``num_tokens``, first in ``cached_blocks``, then in
    ``host_blocks``. Those before block ``first_block`` lie behind the sliding window and need not be held.
    ``saved_tokens``: tokens less the cost of loading. Valid until a pool changes.

    ``awaits``: more is about to be computed, and the sequence should wait for it.
    """

    cached_blocks: list[int]
    host_blocks: list[int]
    num_tokens: int
    saved_tokens: int
    fork: Fork | None = None
    awaits: bool = False
    first_block: int = 0


def offer_of(replica: ReplicaBase, sequence: Sequence) -> Offer | None:
    """The sequence's cached prefix, if there are slots, and :meth:`ReplicaBase.room` for the rest of its tokens."""
    if replica.slots.num_free_slots < sequence.num_slots:
        return None
    num_tokens, size = len(sequence.tokens), replica.block_size
    fork = fork_of(sequence, replica.slots, replica.window)
    match = _find(replica, sequence) if fork is None else Match(fork.first_block, fork.blocks, [])
    first, cached, hosts = match
    needed = replica.blocks_to_admit(sequence.request, num_tokens) - len(cached)
    if needed + replica.pool.num_unheld(cached) > replica.room():
        return None
    if fork is not None:
        return Offer(cached, [], num_tokens - 1, num_tokens - 1, fork, first_block=first)
    swapped = _swapped(replica, sequence)
    found = swapped.num_tokens if swapped is not None else match.num_blocks * size
    waits = _awaits(replica, sequence, match)
    saved = found - replica.host_tier.cost_tokens(len(hosts))
    return Offer(cached, hosts, found, saved, awaits=waits, first_block=first)


def displace_jobs(replica: ReplicaBase, sequence: Sequence) -> Offer | None:
    """Preempt jobs, last first, until an interactive sequence gets its offer. None if it would have to wait all the
    same."""
    jobs = [each for each in replica.slots.occupied() if each.request.priority_class == JOB]
    most = replica.pool.num_free + sum(len(each.blocks) for each in jobs)
    jobs = [each for each in jobs if each is each.head]
    num_tokens = len(sequence.tokens)
    needed = min(-(-num_tokens // replica.block_size), replica.blocks_to_admit(sequence.request, num_tokens))
    if not jobs or most < needed:
        return None
    fork = fork_of(sequence, replica.slots, replica.window)
    if fork is None and _awaits(replica, sequence, _find(replica, sequence)):
        return None
    offer = offer_of(replica, sequence)
    while offer is None and jobs:
        preempt(replica, jobs.pop())
        offer = offer_of(replica, sequence)
    return offer


def _find(replica: ReplicaBase, sequence: Sequence) -> Match:
    """Device blocks with the sequence's first tokens, or those of them that a window leaves, and host blocks with those
    after them."""
    swapped, size = _swapped(replica, sequence), replica.block_size
    # At least one token must be computed, or there would be nothing to sample from.
    limit = (len(sequence.tokens) - 1 if swapped is None else swapped.num_tokens) // size
    looks = _looks_up(replica, sequence)
    if looks:
        sequence.extend_hashes(size)
    if swapped is not None:
        first = swapped.first_block
        cached = replica.index.match(sequence.hashes[first:limit], limit - first) if looks else []
        return Match(first, cached, swapped.host_blocks[len(cached) :])
    if not looks:
        return Match(0, [], [])
    if replica.window.num_tokens and not sequence.keeps_all:
        find, find_host = replica.index.find, replica.host_tier.pool.index.find
        return match_window(find, find_host, sequence.hashes, limit, replica.window.num_matched)
    cached = replica.index.match(sequence.hashes, limit)
    return Match(0, cached, replica.host_tier.match(sequence.hashes, len(cached), limit))


def _awaits(replica: ReplicaBase, sequence: Sequence, match: Match) -> bool:
    return _looks_up(replica, sequence) and awaits(replica, sequence, match.num_blocks)


def _looks_up(replica: ReplicaBase, sequence: Sequence) -> bool:
    """Whether the sequence may use tokens that others computed."""
    return replica.caching and (_swapped(replica, sequence) is not None or not sequence.scores_prompt)


def _swapped(replica: ReplicaBase, sequence: Sequence) -> Swapped | None:
    """The sequence's host blocks, if they are on this replica."""
    swapped = sequence.swapped
    return swapped if swapped is not None and swapped.replica == replica.name else None
