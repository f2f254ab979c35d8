"""One pull, as long as it holds blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagebus.actors.scheduler.moves.link import Link
from pagebus.actors.scheduler.replica.moves.loan import Part
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.bus.messages import PullReport


@dataclass(slots=True, eq=False)
class Pull:
    """``contents`` that a target pulls from a lender's ``sources`` into its ``blocks``: parts of one loan, or of
    several that were made at about the same time. ``hosts``: the sources are blocks of the lender's host tier.
    ``anchors`` and ``num_tokens`` are those of the loans. ``lender`` is None once it is lost. ``step``: the lender's
    last step that may write the sources. ``probes``: it measures the link's rate. ``is_void``: the contents are not
    wanted any more, or cannot be trusted. ``is_over``: its blocks are there, and still held. ``is_promised``: plans may
    use its blocks, while the sources are still being read. ``told``: the reports of the target's ranks."""

    number: int
    lender: Replica | None
    target: Replica
    link: Link
    hosts: bool = False
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
    is_over: bool = False
    is_promised: bool = False
    told: dict[int, PullReport] = field(default_factory=dict)

    def add(self, part: Part, blocks: list[int], step: int, *, probes: bool) -> None:
        """Also pull a part of a loan into these blocks; the lender's ``step`` is the last that may write the part."""
        self.step = max(self.step, step)
        self.probes |= probes
        self.contents += part.contents
        self.sources += part.blocks
        self.blocks += blocks
        self.anchors += part.anchors
        self.num_tokens += part.num_tokens

    @property
    def is_readable(self) -> bool:
        """Whether the lender's blocks hold the contents already."""
        lender = self.lender
        return lender is not None and (lender.has_copied if self.hosts else lender.has_landed)(self.step)

    def since(self, now_s: float) -> float:
        """The time of the first call."""
        self.since_s = now_s if self.since_s is None else self.since_s
        return self.since_s

    def order(self) -> None:
        """The target's next plan has it."""
        self.is_ordered = True

    def promise(self) -> None:
        """Plans from now on may use its blocks."""
        self.is_promised = True

    def void(self) -> None:
        """No sequence waits for it any more."""
        self.is_void = True

    def end(self) -> None:
        """Its blocks are there."""
        self.is_over = True

    def lose_lender(self) -> None:
        """It holds no blocks of the lender any more."""
        self.lender = None
