"""Pulls: blocks of one replica's cache that are copied into another's.

A pull holds its blocks on both sides: the lender's cannot be reallocated while they are read, nor the target's while
they are written. It is ordered once the results of the lender's steps that compute them have arrived. Once the target's
executor reports them as there, they are cached blocks like any others. A failure only costs time: what was not pulled
is computed, and nothing that a failed pull has written can be found.

A lender's blocks may be those of its host tier. If the executors of a host can read each other's host tiers, these
serve the whole host: what one keeps the others need not keep, and a prefix may be spread over several of them, the
target's own included. So a loan may take several pulls.

A sequence that wants the blocks waits in the queue, without a slot, as it would for a disk. It waits only once for each
time it gets a slot, not counting pulls that only measure a link.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

from pagebus.actors.scheduler.kv.block_pool import BlockPool
from pagebus.actors.scheduler.kv.host_pool import HostPool
from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.scheduler.moves.pull import Pull
from pagebus.actors.scheduler.replica.moves.loan import Loan, Part
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.messages import PullReport
from pagebus.bus.messages.moves import PATIENCE_S, combine_reports

SHARE = 0.5
"""The share of a replica's blocks that pulls may hold."""
MOST_PROBES = 64
"""The most recent probes that are remembered as such."""
MOST_BYTES = 1 << 29
"""The size up to which loans join a pull. Many small pulls cost a report each; in a large one, all wait for its end."""

FIRST_PULLS = 4
"""The number of full pulls that are ordered together before more sequences are admitted. Their plan takes a place in
the pipeline, so later ones may wait for a step. Sequences that leave a prefill replica together should not."""


Side = tuple[str, bool]
"""(name of a replica, whether its host tier is meant)."""


@dataclass(slots=True)
class Pulls:
    """All pulls that hold blocks, by number."""

    _live: dict[int, Pull] = field(default_factory=dict)
    _links: dict[tuple[str, str, bool], Link] = field(default_factory=dict)
    """By the address of the lender, target, and whether it leads to the host tier of a neighbour."""
    _bringing: dict[str, dict[bytes, int]] = field(default_factory=dict)
    """By target: contents and the numbers of the pulls that bring them, without those in ``_unread``."""
    _unread: dict[str, list[tuple[int, list[bytes]]]] = field(default_factory=dict)
    """By target: (number, contents) of pulls that are not in ``_bringing`` yet. The first lookup adds them."""
    _probes: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_PROBES))
    """Recent pulls that measured a link."""
    _held: Counter[Side] = field(default_factory=Counter)
    """The number of blocks that pulls hold, once for each pull."""
    _over: list[Pull] = field(default_factory=list)
    _last: int = 0
    num_full: int = 0
    """The number of full pulls so far: another loan like the last one would not have joined them."""

    def __len__(self) -> int:
        return len(self._live)

    # -- for those who seek a loan ------------------------------------------------------------------------------------
    def can_lend(self, lender: Replica, target: Replica, *, hosts: bool = False) -> bool:
        """Whether the target may pull blocks from the lender, or with ``hosts`` from its host tier."""
        alike = bool(lender.kv_kind) and lender.kv_kind == target.kv_kind
        if not alike or target.suspended or not (lender.kv_host if hosts else lender is not target):
            return False
        return not self.link(lender, target, hosts=hosts).is_broken

    def link(self, lender: Replica, target: Replica, *, hosts: bool = False) -> Link:
        """The link from one to the other. On one host, the lender's host tier has a link of its own, which is taken to
        be as fast as the target's own host tier until pulls have measured it. Over a network, both share a link."""
        near = hosts and lender.kv_host == target.kv_host
        key = lender.kv_address, target.name, near
        if key not in self._links:
            rate = ReadRate(target.block_bytes, target.prompt_rate)
            rate.learn(target.copy_bytes_per_s if near else 0.0)
            self._links[key] = Link(rate, target.block_bytes)
        return self._links[key]

    def room(self, lender: Replica, target: Replica) -> int:
        """How many more blocks pulls from one device to the other may hold."""
        left = min(target.pool.num_free, self._room(target, hosts=False))
        return min(left, self._room(lender, hosts=False))

    def fits(self, loan: Loan, target: Replica, replicas: Callable[[str], Replica]) -> bool:
        """Whether pulls may also hold the blocks of this loan."""
        left = min(target.pool.num_free, self._room(target, hosts=False))
        parts = ((self._room(replicas(part.lender), hosts=part.hosts), len(part.blocks)) for part in loan.parts)
        return loan.num_blocks <= left and all(count <= room for room, count in parts)

    def _room(self, replica: Replica, *, hosts: bool) -> int:
        pool = replica.host_tier.pool if hosts else replica.pool
        return int(SHARE * pool.num_blocks) - self._held[replica.name, hosts]

    def keeps_elsewhere(self, target: Replica, neighbours: Iterable[Replica], content: bytes) -> bool:
        """Whether a neighbour's host tier has a content, and pulling it from there is faster than computing it. If so,
        it is marked as used there."""
        for each in neighbours:
            host = each.host_tier.pool.index.find(content)
            if host is None or each.suspended or not self.can_lend(each, target, hosts=True):
                continue
            if self.link(each, target, hosts=True).pays_for_block(target.block_size / target.num_pages):
                each.host_tier.pool.touch(host)
                return True
        return False

    def bringing(self, target: Replica, contents: Iterable[bytes]) -> dict[bytes, int]:
        """The contents that pulls are bringing to the target, each with the number of its pull."""
        known = self._brought_to(target.name)
        return {content: known[content] for content in contents if content in known} if known else {}

    def _brought_to(self, target: str) -> dict[bytes, int]:
        known = self._bringing.setdefault(target, {})
        for number, contents in self._unread.pop(target, ()):
            known.update(zip(contents, repeat(number)))
        return known

    def over(self, link: Link) -> tuple[int, ...]:
        """The numbers of pulls over a link."""
        return tuple(pull.number for pull in self._live.values() if pull.link is link and not pull.is_void)

    def links_of(self, numbers: Iterable[int]) -> list[Link]:
        """The links of these pulls."""
        return [self._live[number].link for number in numbers]

    def may_wait(self, sequence: Sequence) -> bool:
        """Whether the sequence has not waited for a pull yet that was more than a probe."""
        return sequence.pulls is None or all(number in self._probes for number in sequence.pulls)

    # -- the life of a pull -------------------------------------------------------------------------------------------
    def begin(
        self, target: Replica, loan: Loan, kept: list[int], replicas: Callable[[str], Replica]
    ) -> tuple[int, ...]:
        """Begin the pulls of a loan; the target keeps its ``kept`` blocks of the same prefix meanwhile. Returns the
        numbers of all pulls that bring a part of the loan."""
        parts = [(part, replicas(part.lender)) for part in loan.parts if part.blocks]
        target.pool.retain(kept)
        for part, lender in parts:
            _pool(lender, hosts=part.hosts).retain(part.blocks)
        numbers = [self._begin(part, lender, target, probes=loan.probes) for part, lender in parts]
        target.pool.release(reversed(kept))
        return *loan.awaited, *numbers

    def _begin(self, part: Part, lender: Replica, target: Replica, *, probes: bool) -> int:
        index = lender.host_tier.pool.index if part.hosts else lender.index
        step = index.newest_step(part.blocks)
        pull = self._gathering(part, lender, target, step)
        blocks = target.pool.allocate(len(part.blocks))
        pull.link.begin(len(blocks))
        self._held[lender.name, part.hosts] += len(blocks)
        self._held[target.name, False] += len(blocks)
        pull.add(part, blocks, step, probes=probes)
        self.num_full += (len(pull.blocks) + len(blocks)) * target.block_bytes > MOST_BYTES
        self._unread.setdefault(target.name, []).append((pull.number, part.contents))
        return pull.number

    def _gathering(self, part: Part, lender: Replica, target: Replica, step: int) -> Pull:
        """A pull that blocks computed by the lender's ``step`` can join: the newest one, or a new one. Joining never
        makes a pull wait for a later step."""
        pull, wanted = self._live.get(self._last), (lender, target, part.hosts)
        if pull is not None and not (pull.is_ordered or pull.is_void):
            fits = (len(pull.blocks) + len(part.blocks)) * target.block_bytes <= MOST_BYTES
            has_landed = lender.has_copied if part.hosts else lender.has_landed
            is_soon = step <= pull.step or has_landed(step)
            if fits and is_soon and (pull.lender, pull.target, pull.hosts) == wanted:
                return pull
        self._last += 1
        link = self.link(lender, target, hosts=part.hosts)
        pull = self._live[self._last] = Pull(self._last, lender, target, link, part.hosts)
        return pull

    def is_pulling(self, sequence: Sequence) -> bool:
        """Whether a pull for the sequence is still expected."""
        return any((pull := self._live.get(number)) and not pull.is_void for number in sequence.pulls or ())

    @property
    def is_awaited(self) -> bool:
        """Whether a sequence may be waiting for a pull."""
        return any(not pull.is_void for pull in self._live.values())

    def give_up(self, now_s: float) -> None:
        """Void pulls that began too long ago, so that no sequence waits for them any more."""
        for pull in self._live.values():
            if now_s - pull.since(now_s) > PATIENCE_S and not pull.is_void:
                self._void(pull)
                pull.link.ended(len(pull.blocks), there=False, bytes_per_s=0.0)

    def order(self) -> list[Replica]:
        """Let the next plans of their targets carry the pulls whose blocks have been computed. Returns these targets,
        and lenders that need a plan whose result says whether their loads are done."""
        ordered = []
        for pull in self._live.values():
            lender = pull.lender
            if pull.is_ordered or lender is None:
                continue
            if not pull.is_readable:
                if lender.ask_for_copies():
                    ordered.append(lender)
                continue
            pull.order()
            target = pull.target
            target.builder.pulled.add(
                pull.number, lender.kv_address, pull.sources, pull.blocks, hosts=pull.hosts,
                at_once=target.has_finished_with(pull.blocks),
            )  # fmt: skip
            ordered.append(target)
        return ordered

    def take(self, report: PullReport, target: Replica) -> list[int]:
        """Apply a report of this target's executor. Returns the blocks that now hold their contents: none until all of
        its ranks have reported their parts as there."""
        pull = self._live.get(report.pull)
        if pull is None or pull.target is not target or not pull.is_ordered or pull.is_over:
            return []
        if report.promised:
            return self._promised(pull)
        if (said := combine_reports(pull.told, report)) is None:
            return []
        count, there, is_awaited = len(pull.blocks), said.there, not pull.is_void
        if is_awaited or pull.is_promised:
            pull.link.ended(count, there=there, bytes_per_s=said.bytes_per_s, probes=pull.probes)
        if not there:
            target.moves.failed(count)
            if pull.is_promised:
                target.index.forget(pull.blocks)  # the executor ends, because it has computed with them
        if there and is_awaited:
            self._land(pull)
        if there and is_awaited and not pull.hosts and all(each.has_spare for each in (target, pull.lender) if each):
            pull.end()
            self._void(pull)
            self._over.append(pull)
        else:
            self._drop(pull)
        return pull.blocks if there and is_awaited else []

    def _promised(self, pull: Pull) -> list[int]:
        """Plans from now on may use the blocks of a pull. Both sides hold them until it is over."""
        if pull.is_void or pull.is_promised:
            return []
        pull.promise()
        self._void(pull)
        self._land(pull, later=1)
        return pull.blocks

    def _land(self, pull: Pull, later: int = 0) -> None:
        """List the contents of a pull: the target has them once ``later`` more plans have been executed."""
        target, count = pull.target, len(pull.blocks)
        target.moves.pulled(count, pull.num_tokens, hosts=pull.hosts)
        self._probes += [pull.number] if pull.probes else []
        target.index.insert_new(pull.contents, pull.blocks, target.index.step + later)
        target.index.new_anchors.extend(pull.anchors)
        if pull.lender is not None and pull.lender is not target:
            pull.lender.moves.lent(count)

    def settle(self) -> list[Replica]:
        """Release the blocks of pulls that are over, and finish their listing, which the next plan need not wait for.
        Returns the replicas that have got blocks back."""
        changed: list[Replica] = []
        while self._over:
            pull = self._over.pop()
            pull.target.index.settle()
            if pull.number in self._live:
                changed += [each for each in (pull.target, pull.lender) if each is not None]
                self._drop(pull)
        return changed

    def _drop(self, pull: Pull) -> None:
        """Release the blocks of a pull on both sides, and forget it."""
        self._void(pull)
        pull.target.pool.release(reversed(pull.blocks))
        self._held[pull.target.name, False] -= len(pull.blocks)
        self._let_go(pull)
        del self._live[pull.number]

    def _let_go(self, pull: Pull) -> None:
        if pull.lender is not None:
            _pool(pull.lender, hosts=pull.hosts).release(reversed(pull.sources))
            self._held[pull.lender.name, pull.hosts] -= len(pull.blocks)
            pull.lose_lender()

    def _void(self, pull: Pull) -> None:
        """Mark a pull as unwanted: no sequence waits for it any more."""
        if pull.is_void:
            return
        pull.void()
        pull.link.expect_no_more(len(pull.blocks))
        if all(each.is_void for each in self._live.values() if each.target is pull.target):
            self._bringing.pop(pull.target.name, None)
            self._unread.pop(pull.target.name, None)
            return
        known = self._brought_to(pull.target.name)
        for content in pull.contents:
            del known[content]

    # -- changes of replicas ------------------------------------------------------------------------------------------
    def suspend(self, target: Replica) -> None:
        """The target gets no more plans: drop the pulls that no plan has ordered."""
        unsaid = target.builder.drop_pulls()
        for pull in [each for each in self._live.values() if each.target is target]:
            if not pull.is_ordered or pull.number in unsaid:
                self._drop(pull)

    def lose(self, replica: Replica) -> None:
        """A replica is gone: drop its pulls, and void those from it, whose contents are uncertain."""
        for pull in list(self._live.values()):
            if pull.target is replica:
                self._drop(pull)
            elif pull.lender is replica:
                self._void(pull)
                self._let_go(pull)
                if not pull.is_ordered:
                    self._drop(pull)
        for key in [each for each in self._links if each[0] == replica.kv_address or each[1] == replica.name]:
            del self._links[key]

    def void_all(self) -> None:
        """Mark all pulls as unwanted: caches are being emptied."""
        for pull in self._live.values():
            self._void(pull)

    def lent(self, replica: Replica) -> bool:
        """Whether a pull reads from this replica."""
        return any(pull.lender is replica for pull in self._live.values())

    # -- blocks -------------------------------------------------------------------------------------------------------
    def owned(self, replica: Replica) -> Iterator[int]:
        """The replica's blocks that pulls hold, once for each."""
        for pull in self._live.values():
            if pull.target is replica:
                yield from pull.blocks
            if pull.lender is replica and not pull.hosts:
                yield from pull.sources

    def owned_hosts(self, replica: Replica) -> Iterator[int]:
        """:meth:`owned`, of its host tier."""
        for pull in self._live.values():
            if pull.lender is replica and pull.hosts:
                yield from pull.sources

    def check_integrity(self) -> None:
        """Pulls under way are counted and found once.

        Raises:
            AssertionError: it is not so.
        """
        valid = [pull for pull in self._live.values() if not pull.is_void]
        bringing = {(pull.target.name, content): pull.number for pull in valid for content in pull.contents}
        targets = {*self._bringing, *self._unread}
        known = {(name, content): number for name in targets for content, number in self._brought_to(name).items()}
        assert known == bringing, "what pulls bring is out of date"
        held = Counter((each.name, hosts) for pull in self._live.values() for _ in pull.blocks
                       for each, hosts in ((pull.lender, pull.hosts), (pull.target, False))
                       if each is not None)  # fmt: skip
        assert held == +self._held, "blocks that pulls hold are counted wrongly"
        for link in self._links.values():
            count = sum(len(pull.blocks) for pull in valid if pull.link is link)
            assert link.num_under_way == count, "a link counts blocks wrongly"


def _pool(replica: Replica, *, hosts: bool) -> BlockPool | HostPool:
    return replica.host_tier.pool if hosts else replica.pool
