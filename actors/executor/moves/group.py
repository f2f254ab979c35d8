"""The ranks of an executor, as pulls see them: where the blocks of each lie, and whose blocks are whose parts.

A block of an executor lies in parts on all of its ranks, under the same number. Each rank pulls its own part from the
rank of the lender that has the same heads of keys and values. An executor of one rank is a group of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.memory.kind import identity_of
from pagebus.actors.executor.moves.carriers.address import Address
from pagebus.actors.executor.moves.carriers.errors import MoveError


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

    def lender(self, address: Address) -> Address:
        """Which rank of the executor at this ``address`` has this rank's part of a block. Of several that do it is the
        one of the same number, or another for each rank here.

        Raises:
            MoveError: none has.
        """
        own, theirs = self.ranks[self.rank], address.ranks
        alike = [number for number, each in enumerate(theirs) if each.parts == own.parts]
        if not alike:
            raise MoveError(f"none of the source's {len(theirs)} ranks has the heads of rank {self.rank} here")
        return theirs[self.rank if self.rank in alike else alike[self.rank % len(alike)]]


def meet(own: Address | None, kind: str, comm: Comm) -> Group | None:
    """The group of a rank whose blocks of this ``kind`` are at ``own``. All ranks call it at the same time; None if one
    of them can lend nothing. Raises EngineError if a rank is lost."""
    told = comm.tell_all("" if own is None else f"{kind} {own.text()}")
    if not all(told):
        return None
    kinds, addresses = zip(*(each.split(" ", 1) for each in told), strict=True)
    whole = kinds[0] if len(set(kinds)) == 1 else identity_of(*kinds).hex()
    return Group(comm.rank, tuple(map(Address.parse, addresses)), whole)
