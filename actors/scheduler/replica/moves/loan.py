"""Loans: cached blocks of a sequence's prefix that other replicas could lend to one that lacks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """``blocks`` of one ``lender`` with these ``contents``; ``hosts``: of its host tier, which may be the borrower's
    own. ``anchors`` are the contents by which the prefix is found
    (:class:`~pagebus.actors.scheduler.kv.prefix_index.PrefixIndex`). The part lengthens it by ``num_tokens``."""

    lender: str
    hosts: bool
    contents: list[bytes]
    blocks: list[int]
    anchors: list[bytes]
    num_tokens: int

    def first(self, count: int) -> Part:
        """A probe of the first ``count`` blocks, which counts as lengthening nothing."""
        contents = self.contents[:count]
        anchors = [each for each in self.anchors if each in contents]
        return replace(self, contents=contents, blocks=self.blocks[:count], anchors=anchors, num_tokens=0)


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks that lengthen a prefix, one part per place that has some.

    ``saved_tokens`` is what the loan saves, less the cost of waiting for it; 0 or less: it does not pay. ``awaited``
    are pulls under way that bring other blocks of the prefix. ``probes``: only a few blocks are lent, to measure links.
    Valid until a pool changes.
    """

    parts: list[Part]
    saved_tokens: int
    awaited: tuple[int, ...] = ()
    probes: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of all parts."""
        return sum(len(part.blocks) for part in self.parts)

    @property
    def lenders(self) -> Iterable[str]:
        """The lenders, each once."""
        return dict.fromkeys(part.lender for part in self.parts)
