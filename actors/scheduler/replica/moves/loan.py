"""What other replicas could lend one: cached blocks that it lacks of a sequence's first tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Part:
    """``blocks`` of one ``lender`` with these ``contents``; ``hosts``: of its host tier, which may be the borrower's
    own. ``anchors`` are those of the contents by which the prefix is found
    (:class:`~pagebus.actors.scheduler.kv.prefix_index.PrefixIndex`). They lengthen it by ``num_tokens``."""

    lender: str
    hosts: bool
    contents: list[bytes]
    blocks: list[int]
    anchors: list[bytes]
    num_tokens: int

    def first(self, count: int) -> Part:
        """A probe: so many of the blocks, which lengthen nothing."""
        contents = self.contents[:count]
        anchors = [each for each in self.anchors if each in contents]
        return replace(self, contents=contents, blocks=self.blocks[:count], anchors=anchors, num_tokens=0)


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks that lengthen a prefix, from each who has some of them.

    ``saved_tokens`` is what the loan saves less what it costs to wait for it; 0 or less: it does not pay. ``awaited``
    are pulls under way that bring others. ``probes``: it is a part of what could be lent, to tell a link's rate.
    Valid until a pool changes.
    """

    parts: list[Part]
    saved_tokens: int
    awaited: tuple[int, ...] = ()
    probes: bool = False

    @property
    def num_blocks(self) -> int:
        """Of all parts."""
        return sum(len(part.blocks) for part in self.parts)

    @property
    def lenders(self) -> Iterable[str]:
        """Each once."""
        return dict.fromkeys(part.lender for part in self.parts)
