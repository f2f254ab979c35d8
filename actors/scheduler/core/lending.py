"""Finds for one waiting sequence who has most of its prefix, and what that is worth to the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from pagebus.actors.scheduler.fleet.fleet import Fleet
from pagebus.actors.scheduler.kv.prefix_index import page_keys
from pagebus.actors.scheduler.kv.window_match import Match
from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.scheduler.moves.pulls import Pulls
from pagebus.actors.scheduler.replica.moves.loan import Loan
from pagebus.actors.scheduler.replica.prefix_match import Offer, on_device
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence


class Lending:
    """Of the replicas whose blocks can be pulled, the one with the longest prefix of ``sequence`` on its device lends.
    It is looked for once it is asked for."""

    def __init__(self, sequence: Sequence, fleet: Fleet, pulls: Pulls) -> None:
        self._sequence, self._fleet, self._pulls = sequence, fleet, pulls
        self._lender: Replica | None = None
        self._match, self._windowed = Match(0, [], []), Match(0, [], [])
        self._is_known = not fleet.lends or not pulls.may_wait(sequence)

    @property
    def most_tokens(self) -> int:
        """Tokens that nobody has to compute, if they are lent."""
        if not self._is_known:
            self._look()
        return self._match.num_blocks * self._lender.block_size if self._lender is not None else 0

    def _look(self) -> None:
        self._is_known = True
        for row in self._fleet.lenders(self._sequence):
            replica = self._fleet.replicas[row]
            match, windowed = on_device(replica, self._sequence)
            if match.num_blocks > self._match.num_blocks:
                self._lender, self._match, self._windowed = replica, match, windowed

    def lengthen(self, offer: Offer, target: Replica) -> Offer:
        """An offer of the target, with a loan if there could be one."""
        gained = self.most_tokens - offer.num_tokens
        lender = self._lender
        if lender is None or gained <= 0 or offer.fork is not None or offer.disk:
            return offer
        if not self._pulls.can_lend(lender, target):
            return offer
        wanted = self._lacking(target)
        contents = {content: block for content, block in wanted.items() if target.index.find(content) is None}
        awaited = self._pulls.bringing(target, contents)
        blocks = {content: block for content, block in contents.items() if content not in awaited}
        link = self._pulls.link(lender, target)
        if short := min(len(blocks), self._shortage(lender, link, blocks)):
            blocks = dict(islice(blocks.items(), len(blocks) - short))
            gained -= short * lender.block_size
            if gained <= 0:
                return offer
        if len(blocks) > self._pulls.room(lender, target):
            return offer
        saved = link.saves(len(blocks), gained, target.backlog())
        count, numbers = link.room(len(blocks), saved), tuple(dict.fromkeys(awaited.values()))
        if probes := count < len(blocks) and (count > 0 or link.is_unknown):
            blocks, numbers = dict(islice(blocks.items(), count)), numbers + self._pulls.over(link)
        saved = max(1, saved) if count or probes else saved
        anchors = [each for each in self._anchors(lender) if each in blocks]
        tokens = 0 if probes else gained
        loan = Loan(lender.name, list(blocks), list(blocks.values()), anchors, tokens, saved, numbers, probes)
        return replace(offer, loan=loan, saved_tokens=offer.saved_tokens + max(0, saved))

    def _shortage(self, lender: Replica, link: Link, blocks: dict[bytes, int]) -> int:
        """How many of the last blocks had better not be lent: the lender's sequences take them before they come back,
        and would preempt one more of them otherwise."""
        left = lender.pool.num_free - lender.pool.num_unheld(blocks.values())
        if lender.kept.num_tokens or left > len(lender.slots) * lender.block_size:  # without the last a window is void
            return 0
        return max(0, lender.growth(link.seconds(len(blocks))) - left)

    def _lacking(self, target: Replica) -> dict[bytes, int]:
        """The lender's pages with the prefix, by content."""
        hashes, match, pages = self._sequence.hashes, self._match, self._windowed
        wanted = dict(zip(hashes[match.first : match.num_blocks], match.cached, strict=True))
        if each := target.windowed_pages:
            keys = [key for block in hashes[pages.first : match.num_blocks] for key in page_keys(block, each)]
            wanted |= dict(zip(keys, pages.cached, strict=True))
        return wanted

    def _anchors(self, lender: Replica) -> list[bytes]:
        return lender.index.anchors(self._sequence.hashes, self._match.first, self._match.num_blocks)
