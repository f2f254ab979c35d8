"""Finds the replicas that have the prefix of one waiting sequence, on devices and in host tiers, and what a loan of it
is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import NamedTuple

from pagebus.actors.scheduler.fleet.fleet import Fleet
from pagebus.actors.scheduler.kv.prefix_index import MANY, PrefixIndex, page_keys
from pagebus.actors.scheduler.kv.window_match import Match
from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.replica.moves.loan import Loan, Part
from pagebus.actors.scheduler.replica.prefix_match import NOTHING, Offer, behind_device, blocks_for_others
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence

SAMPLED = 16
"""One block of this many is looked up as a sample."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where blocks of a prefix may be: on a replica's device, or in its host tier. ``match``: the part of it on the
    replica's device."""

    replica: Replica
    hosts: bool
    match: Match = NOTHING

    @property
    def index(self) -> PrefixIndex:
        """The index of the blocks there."""
        return self.replica.host_tier.pool.index if self.hosts else self.replica.index


class Share(NamedTuple):
    """What a place lends: contents in the order of the prefix, and the blocks that hold them there."""

    place: Place
    contents: list[bytes]
    blocks: list[int]


Shares = list[Share]
Located = tuple[int, list[bytes], Shares]
"""The number of blocks of a prefix that are somewhere, the contents that the target lacks, and the places that have
them."""


class Lending:
    """A prefix of ``sequence`` can be lent as far as each of its blocks is in some place. The search begins only when
    :attr:`most_tokens` or :meth:`lengthen` needs it."""

    def __init__(self, sequence: Sequence, fleet: Fleet, pulls: Pulls) -> None:
        self._sequence, self._fleet, self._pulls = sequence, fleet, pulls
        self._places: list[Place] = []
        """Places of replicas that list the sequence's first block."""
        self._most_tokens = 0
        self._is_known = not fleet.lends or not pulls.may_wait(sequence)

    @property
    def most_tokens(self) -> int:
        """An upper bound of the tokens that a loan could save."""
        if not self._is_known:
            self._look()
        return self._most_tokens

    def _look(self) -> None:
        self._is_known = True
        sequence, fleet = self._sequence, self._fleet
        lenders = [fleet.replicas[row] for row in fleet.lenders(sequence)]
        self._places = [Place(replica, False, blocks_for_others(replica, sequence, hosts=False)) for replica in lenders]
        most = max((place.match.num_blocks for place in self._places), default=0)
        self._places += [Place(replica, hosts=True) for replica in lenders if replica.kv_host]
        if fleet.lends_hosts and sequence.hashes and not sequence.scores_prompt:
            most = self._most_in_all(most)
        size = fleet.replicas[0].block_size
        self._most_tokens = min(most, (len(sequence.tokens) - 1) // size) * size

    def _most_in_all(self, count: int) -> int:
        """Blocks of the prefix that are in some place, where one replica has ``count`` of them. With windows also those
        after missing ones, so perhaps all."""
        replicas = self._fleet.replicas
        maps = [place.index.blocks for place in self._places]
        maps += [each.host_tier.pool.index.blocks for each in replicas if each.kv_host]
        hashes = self._sequence.hashes
        if replicas[0].kept.num_tokens and any(maps):
            return len(hashes)
        before = -1
        while count > before:
            before = count
            for each in maps:
                count += len(list(takewhile(each.__contains__, islice(hashes, count, None))))
        return count

    def lengthen(self, offer: Offer, target: Replica) -> Offer:
        """An offer of the target, with a loan if one is possible."""
        if self._is_whole(offer, target) or offer.fork is not None or offer.disk:
            return offer
        places = self._reachable(target) if self.most_tokens > offer.num_tokens else []
        if not places:
            return offer
        num_blocks, wanted, shares = self._in_one(places, offer, target) or self._locate(places, target)
        gained = num_blocks * target.block_size - offer.num_tokens
        if gained <= 0 or not wanted:  # a swapped sequence has all its blocks, of which the last may not be full
            return offer
        awaited = self._pulls.bringing(target, wanted)
        numbers = tuple(dict.fromkeys(awaited.values()))
        lacking = [content for content in wanted if content not in awaited] if awaited else wanted
        shares = narrowed(shares, lacking)
        if num_spared := self._num_spared(lacking, shares, target):
            num_blocks = self._sequence.hashes.index(lacking[-num_spared])
            gained = num_blocks * target.block_size - offer.num_tokens
            shares = narrowed(shares, lacking[:-num_spared])
            if gained <= 0:
                return offer
        lent = sum(len(share.blocks) for share in shares)
        mine = gained * lent // max(1, lent + len(awaited))  # what is under way lengthens the prefix by the rest
        loan = self._loan(self._parts(shares, mine, num_blocks), gained, numbers, target)
        return offer if loan is None else replace(
            offer, loan=loan, saved_tokens=offer.saved_tokens + max(0, loan.saved_tokens)
        )  # fmt: skip

    def _is_whole(self, offer: Offer, target: Replica) -> bool:
        """Whether the target has all that it can use; one token is always computed."""
        return offer.num_tokens + target.block_size >= len(self._sequence.tokens)

    def _in_one(self, places: list[Place], offer: Offer, target: Replica) -> Located | None:
        """:meth:`_locate` in the usual case, without a search for each block: the nearest device has all of the prefix
        that there is, and the target has only its beginning. Blocks are evicted from the end of a prefix, so a sample
        of many suffices. Blocks that the target has nevertheless are pulled in vain, and not listed."""
        nearest, hashes, start = places[0], self._sequence.hashes, len(offer.cached_blocks)
        _, blocks, hosts = nearest.match
        have, end = target.index.blocks, len(blocks)
        if target.kept.num_tokens or self._sequence.swapped is not None or hosts or end <= start:
            return None
        behind = hashes[end] if end * target.block_size < len(self._sequence.tokens) - target.block_size else b""
        wanted = hashes[start:end]
        if any(behind in each for each in (have, *(place.index.blocks for place in places))):
            return None
        if not have.keys().isdisjoint(wanted if len(wanted) <= MANY else wanted[::SAMPLED]):
            return None
        return end, wanted, [Share(nearest, wanted, blocks[start:])]

    def _locate(self, places: list[Place], target: Replica) -> Located:
        """How many blocks of the prefix are on the target's device or in some place; the contents of those that are not
        on its device (none if the target has swapped the sequence out); and what each place has that no place before it
        has, of these contents and perhaps others."""
        left = self._sequence.hashes
        if each := target.windowed_pages:
            left = left + [key for block_hash in left for key in page_keys(block_hash, each)]
        have, shares = target.index.blocks, Shares()
        found = {content: have[content] for content in left if content in have}
        for place in places:
            left = [content for content in left if content not in found] if found else left
            blocks = list(map(place.index.blocks.get, left))  # no line of Python for each block
            here = {content: block for content, block in zip(left, blocks, strict=True) if block is not None}
            shares.append(Share(place, list(here), list(here.values())))
            found |= here
        num_blocks, behind = behind_device(target, self._sequence, found.get)
        return num_blocks, [content for content in behind if content not in have and content in found], shares

    def _reachable(self, target: Replica) -> list[Place]:
        """The places that the target can pull from, the nearest first: devices of its host, its own host tier, those of
        its neighbours, then the same on other hosts."""
        mine = {place.replica.name for place in self._places if place.hosts}
        places = self._places + [
            Place(each, hosts=True) for each in self._fleet.neighbours(target) if each.name not in mine
        ]
        able = [each for each in places if self._pulls.can_lend(each.replica, target, hosts=each.hosts)]

        def distance(place: Place) -> tuple[bool, bool, bool, int]:
            replica = place.replica
            return replica.kv_host != target.kv_host, place.hosts, replica is not target, -place.match.num_blocks

        return sorted(able, key=distance)

    def _num_spared(self, lacking: list[bytes], shares: Shares, target: Replica) -> int:
        """How many of the last blocks should not be lent: the sequences of the device that has them will need the space
        before the loan ends, and one of them would be preempted."""
        for place, contents, blocks in shares:
            if lacking[-1:] == contents[-1:] and not place.hosts:
                link = self._pulls.link(place.replica, target)
                short = self._shortage(place.replica, link, blocks)
                tail = islice(zip(reversed(contents), reversed(lacking), strict=False), short)
                return len(list(takewhile(lambda pair: pair[0] == pair[1], tail)))
        return 0

    def _shortage(self, lender: Replica, link: Link, blocks: list[int]) -> int:
        """How many of the last blocks the lender's sequences need before they come back."""
        left = lender.pool.num_free - lender.pool.num_unheld(blocks)
        if lender.kept.num_tokens or left > len(lender.slots) * lender.block_size:  # without the last a window is void
            return 0
        return max(0, lender.growth(link.seconds(len(blocks))) - left)

    def _parts(self, shares: Shares, gained: int, num_blocks: int) -> list[Part]:
        """The part that each place lends. The tokens gained are divided among the parts."""
        parts, left, anchors = [], gained, self._anchors(num_blocks)
        num_lent = sum(len(share.blocks) for share in shares)
        for place, contents, blocks in shares:
            tokens = gained * len(blocks) // num_lent
            known = contents if len(anchors) == 1 else set(contents)
            mine = [each for each in anchors if each in known]
            parts.append(Part(place.replica.name, place.hosts, contents, blocks, mine, tokens))
            left -= tokens
        if parts:
            parts[0] = replace(parts[0], num_tokens=parts[0].num_tokens + left)
        return parts

    def _loan(self, parts: list[Part], gained: int, awaited: tuple[int, ...], target: Replica) -> Loan | None:
        """The loan to pull now: all parts, or a few blocks to measure the links. None if pulls hold too many blocks."""
        links = [self._pulls.link(self._fleet.named(part.lender), target, hosts=part.hosts) for part in parts]
        whole = Loan(parts, 0, awaited)
        if not self._pulls.fits(whole, target, self._fleet.named):
            return None
        num_blocks = Counter[Link](dict.fromkeys(self._pulls.links_of(awaited), 0))
        num_blocks.update({link: len(part.blocks) for link, part in zip(links, parts, strict=True)})
        waits = sum(link.waits(count) for link, count in num_blocks.items()) - target.ahead()
        saved = int(gained - max(0.0, waits))
        counts = [link.room(len(part.blocks), saved) for link, part in zip(links, parts, strict=True)]
        probing = [
            count < len(part.blocks) and (count > 0 or link.is_unknown)
            for count, part, link in zip(counts, parts, links, strict=True)
        ]
        if any(probing):
            tried = [part.first(count) for part, count, probes in zip(parts, counts, probing, strict=True) if probes]
            asked = [link for link, probes in zip(links, probing, strict=True) if probes]
            return Loan(tried, max(1, saved), awaited + self._over(asked), probes=True)
        pulls_all = all(count == len(part.blocks) for count, part in zip(counts, parts, strict=True))
        if parts:
            saved = max(1, saved) if pulls_all else min(0, saved)
        return replace(whole, saved_tokens=saved)

    def _over(self, links: Iterable[Link]) -> tuple[int, ...]:
        return tuple(number for link in links for number in self._pulls.over(link))

    def _anchors(self, num_blocks: int) -> list[bytes]:
        return self._fleet.replicas[0].index.anchors(self._sequence.hashes, 0, num_blocks)


def narrowed(shares: Shares, contents: list[bytes]) -> Shares:
    """The shares without other contents than these, of which each is in some share; empty shares are dropped."""
    if sum(len(share.blocks) for share in shares) > len(contents):
        wanted = set(contents)
        shares = [
            Share(place, [each for each in lent if each in wanted],
                  [block for each, block in zip(lent, blocks, strict=True) if each in wanted])
            for place, lent, blocks in shares
        ]  # fmt: skip
    return [share for share in shares if share.blocks]
