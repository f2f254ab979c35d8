"""The ranks of an executor, as pulls see them: where the blocks of each lie, and whose blocks are whose parts.

A block of an executor lies in parts on all of its ranks, under the same number. Each rank pulls its own part from the
rank of the lender that has the same heads of keys and values, or cuts it out of the parts of those that have some of
them. An executor of one rank is a group of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.memory.block_cuts import Cut
from pagebus.actors.executor.memory.block_parts import HeadRows
from pagebus.actors.executor.memory.kind import identity_of
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import MoveError

Parts = tuple[HeadRows, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """This process has ``rank`` of it. ``kind`` is that of the blocks, ``ranks`` are the addresses of all ranks'."""

    rank: int
    ranks: tuple[Address, ...]
    kind: str = ""

    @property
    def address(self) -> str:
        """What its lease says: the addresses of all ranks."""
        first, *others = self.ranks
        return replace(first, others=tuple(others)).text()

    @property
    def host(self) -> str:
        """The host whose executors can read its host tier: those of all ranks, if they are on several. Empty if none
        can."""
        if any(each.hosts is None or not each.host for each in self.ranks):
            return ""
        hosts = [each.host for each in self.ranks]
        return hosts[0] if len(set(hosts)) == 1 else " ".join(hosts)

    @property
    def block_bytes(self) -> int:
        """Of the rank whose part of a block is the largest."""
        return max(each.block_bytes for each in self.ranks)

    def lenders(self, address: Address) -> list[tuple[Address, list[Cut]]]:
        """Which ranks of the executor at this ``address`` have what this rank has of a block, and where; nothing is cut
        out of the blocks of one that has the same. Of several that have the same heads it is the one that lies where
        this rank does, so that each is asked by as many.

        Raises:
            MoveError: none has some head, or blocks differ otherwise.
        """
        own, theirs = self.ranks[self.rank].parts, address.ranks
        share = self.rank / len(self.ranks)
        alike = [rank for rank, each in enumerate(theirs) if each.parts == own]
        if alike:
            return [(theirs[_nearest(alike, share * len(theirs))], [])]
        return [(theirs[rank], cuts) for rank, cuts in cuts_of(own, [each.parts for each in theirs], share).items()]


def meet(own: Address | None, kind: str, comm: Comm) -> Group | None:
    """The group of a rank whose blocks of this ``kind`` are at ``own``. All ranks call it at the same time; None if one
    of them can lend nothing. Raises EngineError if a rank is lost."""
    told = comm.tell_all("" if own is None else f"{kind} {own.text()}")
    if not all(told):
        return None
    kinds, addresses = zip(*(each.split(" ", 1) for each in told), strict=True)
    whole = kinds[0] if len(set(kinds)) == 1 else identity_of(*kinds).hex()
    return Group(comm.rank, tuple(map(Address.parse, addresses)), whole)


def cuts_of(own: Parts, ranks: Sequence[Parts], share: float) -> dict[int, list[Cut]]:
    """By number of a lender's rank, what is one's ``own`` of its blocks. Of several ranks that have a head it is the
    one that lies nearest to the ``share`` of all ranks behind the first.

    Raises:
        MoveError: blocks differ in more than who has which heads, or nobody has some head.
    """
    found: dict[int, list[Cut]] = {}
    for index, part in enumerate(own):
        done = part.first
        while done < part.first + part.count:
            holders = [each for each, parts in enumerate(ranks) if _has(parts, index, part, done)]
            if not holders:
                raise MoveError(f"none of the source's {len(ranks)} ranks has head {done}, or its blocks are others")
            rank = _nearest(holders, share * len(ranks))
            theirs = ranks[rank][index]
            count = min(part.first + part.count, theirs.first + theirs.count) - done
            found.setdefault(rank, []).append(
                Cut(part.rows, part.head_bytes, count, done - theirs.first, _offset(ranks[rank], index), theirs.count,
                    done - part.first, _offset(own, index), part.count)
            )  # fmt: skip
            done += count
    return found


def _nearest(ranks: Sequence[int], place: float) -> int:
    return min(ranks, key=lambda each: abs(each - place))


def _has(parts: Parts, index: int, own: HeadRows, head: int) -> bool:
    if index >= len(parts):
        return False
    part = parts[index]
    alike = (part.rows, part.head_bytes) == (own.rows, own.head_bytes)
    return alike and part.first <= head < part.first + part.count


def _offset(parts: Parts, index: int) -> int:
    return sum(part.num_bytes for part in parts[:index])
