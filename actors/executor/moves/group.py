"""The ranks of an executor, as pulls see them: where the blocks of each are, and which part of a block each has.

Each rank of an executor holds a part of every block, under the same number. It pulls its part from the rank of the
lender that has the same heads of keys and values, or cuts it out of the parts of several that have some of them. An
executor of one rank is a group of one.
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
        """Size of the largest part of a block that any rank has."""
        return max(each.block_bytes for each in self.ranks)

    def lenders(self, address: Address) -> list[tuple[Address, list[Cut]]]:
        """The ranks of the executor at ``address`` that have this rank's part of a block, each with the cuts to make;
        none from a rank that has exactly this part. Of several with the same heads the one nearest to this rank's place
        in its group is taken, so that each serves equally many.

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
    """Cuts that make up the ``own`` parts, by number of the lender's rank. Of several ranks that have a head it is the
    one nearest to the fraction ``share`` of all ranks.

    Raises:
        MoveError: blocks differ in more than the heads that ranks hold, or a head is on none of them.
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
