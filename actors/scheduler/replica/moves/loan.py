"""What one replica could lend another: cached blocks that the other lacks of a sequence's first tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loan:
    """``blocks`` of the ``lender`` with these ``contents``, which lengthen a prefix by ``num_tokens``.

    ``saved_tokens`` is what the loan saves less what it costs to wait for it; 0 or less: it does not pay. ``awaited``
    are pulls under way that bring others. ``probes``: it is a part of what could be lent, to tell the link's rate.
    ``anchors`` are those of the contents by which the prefix is found
    (:class:`~pagebus.actors.scheduler.kv.prefix_index.PrefixIndex`). Valid until a pool changes.
    """

    lender: str
    contents: list[bytes]
    blocks: list[int]
    anchors: list[bytes]
    num_tokens: int
    saved_tokens: int
    awaited: tuple[int, ...] = ()
    probes: bool = False
