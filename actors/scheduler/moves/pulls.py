"""Pulls: blocks of one replica's cache that are copied into another's.

A pull holds its blocks on both sides: the lender's cannot be given away while they are read, nor the target's while
they are written. It is ordered once the lender's steps that compute them have landed. Once the target's executor says
that they are there, they are cached blocks like any others. Whatever goes wrong costs speed only: what was not pulled
is computed, and nothing that a failed pull has written can be found.

A sequence that wants the blocks waits in the queue, without a slot, as it would for a disk. It waits once until it has
a slot, not counting pulls that only told how fast a link is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.scheduler.replica.moves.loan import Loan
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.messages import PullReport

SHARE = 0.5
"""Of a replica's blocks that pulls may hold."""
PATIENCE_S = 10.0
"""Nobody waits for a pull longer than that. What it holds stays its own until its executor has said what became of
it."""
MOST_PROBES = 64
"""Of which is known that they were no more than that."""
MOST_BYTES = 1 << 29
"""A pull takes up no further loan that would make it larger. Many small pulls cost a report each; from a large one all
get their blocks at its end."""


@dataclass(slots=True, eq=False)
class Pull:
    """``contents`` that a target pulls from a lender's ``sources`` into its ``blocks``: one loan, or several that were
    made at about the same time. ``anchors`` and ``num_tokens`` are those of the loans. ``lender`` is None once that is
    lost. ``step``: the lender's last one that may write the blocks. ``probes``: it is to tell the link's rate.
    ``is_void``: the contents are not wanted any more, or not to be trusted."""

    number: int
    lender: Replica | None
    target: Replica
    link: Link
    contents: list[bytes] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    anchors: list[bytes] = field(default_factory=list)
    num_tokens: int = 0
    step: int = 0
    since_s: float | None = None
    probes: bool = False
    is_ordered: bool = False
    is_void: bool = False

    def add(self, loan: Loan, blocks: list[int]) -> None:
        """Bring what is lent into these blocks, too."""
        self.contents += loan.contents
        self.sources += loan.blocks
        self.blocks += blocks
        self.anchors += loan.anchors
        self.num_tokens += loan.num_tokens


@dataclass(slots=True)
class Pulls:
    """All pulls that hold blocks, by number."""

    _live: dict[int, Pull] = field(default_factory=dict)
    _links: dict[tuple[str, str], Link] = field(default_factory=dict)
    _bringing: dict[str, dict[bytes, int]] = field(default_factory=dict)
    """By target: contents and the numbers of the pulls that bring them."""
    _probes: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_PROBES))
    """Those that told a link's rate, of late."""
    _held: Counter[str] = field(default_factory=Counter)
    """By replica: blocks that pulls hold, once for each pull."""
    _last: int = 0

    def __len__(self) -> int:
        return len(self._live)

    # -- for whoever looks for a loan ---------------------------------------------------------------------------------
    def can_lend(self, lender: Replica, target: Replica) -> bool:
        """Whether blocks may be pulled from one by the other."""
        alike = bool(lender.kv_kind) and lender.kv_kind == target.kv_kind and lender is not target
        return alike and not target.suspended and not self.link(lender, target).is_broken

    def link(self, lender: Replica, target: Replica) -> Link:
        """The way from one to the other."""
        key = lender.kv_address, target.name
        if key not in self._links:
            self._links[key] = Link(ReadRate(target.block_bytes, target.prompt_rate), target.block_bytes)
        return self._links[key]

    def room(self, lender: Replica, target: Replica) -> int:
        """Blocks that one more pull may hold."""
        return min(
            target.pool.num_free,
            *(int(SHARE * each.pool.num_blocks) - self._held[each.name] for each in (lender, target)),
        )

    def bringing(self, target: Replica, contents: Iterable[bytes]) -> dict[bytes, int]:
        """Those of the contents that a pull brings to the target, with its number."""
        known = self._bringing.get(target.name, {})
        return {content: known[content] for content in contents if content in known} if known else {}

    def over(self, link: Link) -> tuple[int, ...]:
        """Those that come over a link."""
        return tuple(pull.number for pull in self._live.values() if pull.link is link and not pull.is_void)

    def may_wait(self, sequence: Sequence) -> bool:
        """Whether the sequence has not waited for a pull yet that was more than a probe."""
        return sequence.pulls is None or all(number in self._probes for number in sequence.pulls)

    # -- the life of a pull -------------------------------------------------------------------------------------------
    def begin(self, lender: Replica, target: Replica, loan: Loan, kept: list[int]) -> tuple[int, ...]:
        """Pull what is lent, in which the target has ``kept`` blocks. Returns the numbers of all pulls that bring a
        part of it."""
        if not loan.blocks:
            return loan.awaited
        pull = self._gathering(lender, target, len(loan.blocks))
        pull.probes |= loan.probes
        target.pool.retain(kept)
        lender.pool.retain(loan.blocks)
        blocks = target.pool.allocate(len(loan.blocks))
        target.pool.release(reversed(kept))
        pull.link.begin(len(blocks))
        for each in (lender, target):
            self._held[each.name] += len(blocks)
        pull.step = max(pull.step, lender.index.newest_step(loan.blocks))
        pull.add(loan, blocks)
        self._bringing.setdefault(target.name, {}).update(dict.fromkeys(loan.contents, pull.number))
        return *loan.awaited, pull.number

    def _gathering(self, lender: Replica, target: Replica, num_blocks: int) -> Pull:
        """A pull that so many blocks can join: the newest one, or another."""
        pull = self._live.get(self._last)
        fits = pull is not None and (len(pull.blocks) + num_blocks) * target.block_bytes <= MOST_BYTES
        is_open = pull is not None and not (pull.is_ordered or pull.is_void)
        if pull is not None and is_open and fits and (pull.lender, pull.target) == (lender, target):
            return pull
        self._last += 1
        pull = self._live[self._last] = Pull(self._last, lender, target, self.link(lender, target))
        return pull

    def is_pulling(self, sequence: Sequence) -> bool:
        """Whether something that is pulled for the sequence is not there yet, and still expected."""
        return any((pull := self._live.get(number)) and not pull.is_void for number in sequence.pulls or ())

    @property
    def is_awaited(self) -> bool:
        """Whether somebody may wait for a pull."""
        return any(not pull.is_void for pull in self._live.values())

    def give_up(self, now_s: float) -> None:
        """Nobody waits any more for what was begun too long ago."""
        for pull in self._live.values():
            pull.since_s = now_s if pull.since_s is None else pull.since_s
            if now_s - pull.since_s > PATIENCE_S and not pull.is_void:
                self._void(pull)
                pull.link.ended(len(pull.blocks), there=False, bytes_per_s=0.0)

    def order(self) -> list[Replica]:
        """Let the next plans of their targets carry the pulls whose blocks have been computed. Returns these
        targets, and lenders that are to say by a plan whether what they load is there."""
        ordered = []
        for pull in self._live.values():
            lender = pull.lender
            if pull.is_ordered or lender is None:
                continue
            if not lender.has_landed(pull.step):
                if lender.ask_for_copies():
                    ordered.append(lender)
                continue
            pull.is_ordered = True
            pull.target.builder.pulled.add(pull.number, lender.kv_address, pull.sources, pull.blocks)
            ordered.append(pull.target)
        return ordered

    def take(self, report: PullReport, target: Replica) -> list[int]:
        """Apply a report of this target's executor. Returns the blocks that hold now what was wanted."""
        pull = self._live.get(report.pull)
        if pull is None or pull.target is not target or not pull.is_ordered:
            return []
        count = len(pull.blocks)
        if not pull.is_void:
            rate = report.bytes_per_s
            pull.link.ended(count, there=report.there, bytes_per_s=rate, probes=pull.probes)
        lands = report.there and not pull.is_void
        target.moves.num_pulled += count * lands
        target.moves.num_pulled_tokens += pull.num_tokens * lands
        target.moves.num_failed += count * (not report.there)
        if lands:
            self._probes += [pull.number] if pull.probes else []
            for content, block in zip(pull.contents, pull.blocks, strict=True):
                target.index.insert(content, block)
            target.index.new_anchors += pull.anchors
            if pull.lender is not None:
                pull.lender.moves.num_lent += count
        self._drop(pull)
        return pull.blocks if lands else []

    def _drop(self, pull: Pull) -> None:
        """Give back what a pull holds on both sides."""
        self._void(pull)
        pull.target.pool.release(reversed(pull.blocks))
        self._held[pull.target.name] -= len(pull.blocks)
        self._let_go(pull)
        del self._live[pull.number]

    def _let_go(self, pull: Pull) -> None:
        if pull.lender is not None:
            pull.lender.pool.release(reversed(pull.sources))
            self._held[pull.lender.name] -= len(pull.blocks)
            pull.lender = None

    def _void(self, pull: Pull) -> None:
        """Nobody waits any more for what a pull brings."""
        if pull.is_void:
            return
        pull.is_void = True
        pull.link.num_under_way -= len(pull.blocks)
        known = self._bringing[pull.target.name]
        for content in pull.contents:
            if known.get(content) == pull.number:
                del known[content]

    # -- what replicas do ---------------------------------------------------------------------------------------------
    def suspend(self, target: Replica) -> None:
        """The target gets no more plans: what none has ordered never begins."""
        unsaid = target.builder.drop_pulls()
        for pull in [each for each in self._live.values() if each.target is target]:
            if not pull.is_ordered or pull.number in unsaid:
                self._drop(pull)

    def lose(self, replica: Replica) -> None:
        """A replica is gone: nothing more becomes of its pulls, and nobody knows what others pull from it."""
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
        """Cached contents are not wanted any more."""
        for pull in self._live.values():
            self._void(pull)

    def lent(self, replica: Replica) -> bool:
        """Whether somebody pulls from a replica."""
        return any(pull.lender is replica for pull in self._live.values())

    # -- blocks -------------------------------------------------------------------------------------------------------
    def owned(self, replica: Replica) -> Iterator[int]:
        """The replica's blocks that pulls hold, once for each."""
        for pull in self._live.values():
            if pull.target is replica:
                yield from pull.blocks
            if pull.lender is replica:
                yield from pull.sources

    def check_integrity(self) -> None:
        """What is under way is counted, and found, once.

        Raises:
            AssertionError: it is not so.
        """
        valid = [pull for pull in self._live.values() if not pull.is_void]
        bringing = {(pull.target.name, content): pull.number for pull in valid for content in pull.contents}
        known = {(name, content): number for name, each in self._bringing.items() for content, number in each.items()}
        assert known == bringing, "what pulls bring is out of date"
        held = Counter(each.name for pull in self._live.values() for each in (pull.lender, pull.target)
                       for _ in pull.blocks if each is not None)  # fmt: skip
        assert held == +self._held, "blocks that pulls hold are counted wrongly"
        for link in self._links.values():
            count = sum(len(pull.blocks) for pull in valid if pull.link is link)
            assert link.num_under_way == count, "a link counts blocks wrongly"
