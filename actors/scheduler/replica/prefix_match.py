"""Finds what a replica can offer to a waiting sequence: room, and cached tokens."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.scheduler.held_blocks import Swapped
from pagebus.actors.scheduler.kv.prefix_index import leading, page_keys
from pagebus.actors.scheduler.kv.window_match import Find, Match, match_window
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.moves.loan import Loan
from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.actors.scheduler.replica.prefix_wait import awaits
from pagebus.actors.scheduler.replica.prompt_fork import Fork, fork_of
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.request import Sequence

NOTHING = Match(0, [], [])
"""Never changed."""
_ON_DISK = -1
"""In place of a host block."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens of a sequence that a replica with room holds: ``num_tokens``, first in ``cached_blocks``, then in
    ``host_blocks``. Those before block ``first_block`` are outside the sliding window and need not be held.
    ``windowed``: the same for pages of layers with a window, if other layers have none.
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
    windowed: Match = NOTHING
    disk: tuple[bytes, ...] = ()
    """Contents on the disk that would lengthen the prefix by ``disk_tokens``."""
    disk_tokens: int = 0
    loan: Loan | None = None
    """Blocks that other replicas could lend to lengthen the prefix."""


def offer_of(replica: ReplicaBase, sequence: Sequence) -> Offer | None:
    """The sequence's cached prefix, if there are slots, and :meth:`ReplicaBase.room` for the rest of its tokens."""
    if replica.slots.num_free_slots < sequence.num_slots:
        return None
    num_tokens, size = len(sequence.tokens), replica.block_size
    fork = fork_of(replica, sequence)
    match, windowed = _find(replica, sequence) if fork is None else _forked(fork)
    first, cached, hosts = match
    found_pages = cached + windowed.cached
    needed = replica.blocks_to_admit(sequence.request, num_tokens) - len(found_pages)
    needed += replica.adapters.num_needed(sequence.request.digest)
    if needed + replica.pool.num_unheld(found_pages) > replica.room():
        return None
    if fork is not None:
        return Offer(cached, [], num_tokens - 1, num_tokens - 1, fork, first_block=first, windowed=windowed)
    swapped = _swapped(replica, sequence)
    found = swapped.num_tokens if swapped is not None else match.num_blocks * size
    waits = _awaits(replica, sequence, match)
    saved = found - replica.host_tier.cost_tokens(len(hosts) + len(windowed.hosts))
    disk: tuple[bytes, ...] = ()
    gained = 0
    if replica.disk_tier.is_on and swapped is None:
        waits = waits or replica.disk_tier.is_reading(sequence)
        disk, gained = _on_disk(replica, sequence, match)
        saved += max(0, gained - replica.disk_tier.cost_tokens(len(disk)))
    return Offer(cached, hosts, found, saved, None, waits, first, windowed, disk, gained)


def displace_jobs(replica: ReplicaBase, sequence: Sequence) -> Offer | None:
    """Preempt jobs, last first, until an interactive sequence gets its offer. None if it would have to wait anyway."""
    jobs = [each for each in replica.slots.occupied() if each.request.priority_class == JOB]
    most = replica.pool.num_free + replica.adapters.num_held + sum(len(each.pages) for each in jobs)
    jobs = [each for each in jobs if each is each.head]
    num_tokens = len(sequence.tokens)
    needed = min(-(-num_tokens // replica.block_size), replica.blocks_to_admit(sequence.request, num_tokens))
    if not jobs or most < needed:
        return None
    fork = fork_of(replica, sequence)
    if fork is None and _awaits(replica, sequence, _find(replica, sequence)[0]):
        return None
    if replica.disk_tier.is_reading(sequence):
        return None
    offer = offer_of(replica, sequence)
    while offer is None and jobs:
        preempt(replica, jobs.pop())
        offer = offer_of(replica, sequence)
    return offer


def _forked(fork: Fork) -> tuple[Match, Match]:
    return Match(fork.first_block, fork.blocks, []), Match(fork.first_windowed, fork.windowed, [])


def _on_disk(replica: ReplicaBase, sequence: Sequence, match: Match) -> tuple[tuple[bytes, ...], int]:
    """Contents to read for a longer match, and the tokens that they add. Nothing if that does not pay, or was tried
    before."""
    if sequence.disk_reads is not None or not _looks_up(replica, sequence):
        return (), 0
    hosts, tier = replica.host_tier.pool.index, replica.disk_tier
    most = min(len(sequence.hashes), (len(sequence.tokens) - 1) // replica.block_size)
    if match.num_blocks >= most:
        return (), 0

    def find(content: bytes) -> int | None:
        host = hosts.find(content)
        return _ON_DISK if host is None and tier.has(content) else host

    num_blocks, contents = behind_device(replica, sequence, find)
    gained = (num_blocks - match.num_blocks) * replica.block_size
    if gained <= 0:
        return (), 0
    missing = tuple(content for content in contents if hosts.find(content) is None)
    return (missing, gained) if tier.pays(len(missing), gained) else ((), 0)


def behind_device(replica: ReplicaBase, sequence: Sequence, find: Find) -> tuple[int, list[bytes]]:
    """The number of blocks of the longest match whose contents are on the device or found by ``find``, and the contents
    that are not on the device."""
    match, pages = _find(replica, sequence, find)
    contents = list(sequence.hashes[match.first + len(match.cached) : match.num_blocks])
    if each := replica.windowed_pages:
        keys = [key for block in sequence.hashes[pages.first : match.num_blocks] for key in page_keys(block, each)]
        contents += keys[len(pages.cached) :]
    return match.num_blocks, contents


def _find(replica: ReplicaBase, sequence: Sequence, find_host: Find | None = None) -> tuple[Match, Match]:
    """Device blocks with the sequence's first tokens, or those of them that a window leaves, and host blocks with those
    after them. Then the same of pages of layers with windows, where others have none. ``find_host``: in place of the
    host tier's index."""
    swapped, size = _swapped(replica, sequence), replica.block_size
    # At least one token must be computed, or there would be nothing to sample from.
    limit = (len(sequence.tokens) - 1 if swapped is None else swapped.num_tokens) // size
    looks = _looks_up(replica, sequence)
    if looks:
        sequence.extend_hashes(size)
    if swapped is not None:
        first = swapped.first_block
        cached = replica.index.match(sequence.hashes[first:limit], limit - first) if looks else []
        match = Match(first, cached, swapped.host_blocks[len(cached) :])
        return match, _swapped_pages(replica, sequence, swapped, limit if looks else 0)
    return _match(replica, sequence, limit, find_host) if looks else (NOTHING, NOTHING)


def blocks_for_others(replica: ReplicaBase, sequence: Sequence, *, hosts: bool) -> Match:
    """The blocks of a sequence's prefix that a replica could lend from its device, with ``hosts`` also from its host
    tier."""
    if not replica.caching or sequence.scores_prompt:
        return NOTHING
    limit = (len(sequence.tokens) - 1) // replica.block_size
    return _match(replica, sequence, limit, None if hosts else _nowhere)[0]


def _nowhere(_: bytes) -> None:
    """The lookup of an empty host tier."""


def _match(replica: ReplicaBase, sequence: Sequence, limit: int, find_host: Find | None) -> tuple[Match, Match]:
    """:func:`_find` among cached blocks alone, up to block ``limit``."""
    if replica.window.num_tokens and not sequence.keeps_all:
        find, find_host = replica.index.find, find_host or replica.host_tier.pool.index.find
        return match_window(find, find_host, sequence.hashes, limit, replica.window.num_matched), NOTHING
    cached = replica.index.match(sequence.hashes, limit)
    if find_host is None:
        hosts = replica.host_tier.match(sequence.hashes, len(cached), limit)
    else:
        hosts = leading(find_host, sequence.hashes[len(cached) : limit])
    match = Match(0, cached, hosts)
    return _with_pages(replica, sequence, match, find_host) if replica.windowed_pages else (match, NOTHING)


def _with_pages(replica: ReplicaBase, sequence: Sequence, match: Match, find_host: Find | None) -> tuple[Match, Match]:
    """The part of a match for which the pages of layers with windows are found: those of the last window, or all for
    beams."""
    each, most = replica.windowed_pages, match.num_blocks
    find, find_host = replica.index.find, find_host or replica.host_tier.pool.index.find
    needed = max(1, most) if sequence.keeps_all else replica.windowed.num_matched
    pages = match_window(find, find_host, sequence.hashes, most, needed, each)
    return match.cut(pages.first + (len(pages.cached) + len(pages.hosts)) // each), pages


def _swapped_pages(replica: ReplicaBase, sequence: Sequence, swapped: Swapped, limit: int) -> Match:
    """Pages of layers with windows that were swapped out, the first of them still on the device as far as block
    ``limit``."""
    first, each = swapped.first_windowed, replica.windowed_pages
    keys = [key for block_hash in sequence.hashes[first:limit] for key in page_keys(block_hash, each)]
    cached = replica.index.match(keys, len(keys))
    return Match(first, cached, swapped.windowed_hosts[len(cached) :])


def _awaits(replica: ReplicaBase, sequence: Sequence, match: Match) -> bool:
    return _looks_up(replica, sequence) and awaits(replica, sequence, match.num_blocks)


def _looks_up(replica: ReplicaBase, sequence: Sequence) -> bool:
    """Whether the sequence may use tokens that others computed."""
    return replica.caching and (_swapped(replica, sequence) is not None or not sequence.scores_prompt)


def _swapped(replica: ReplicaBase, sequence: Sequence) -> Swapped | None:
    """The sequence's host blocks, if they are on this replica."""
    swapped = sequence.swapped
    return swapped if swapped is not None and swapped.replica == replica.name else None
