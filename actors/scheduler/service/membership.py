"""Membership: turns leases into the core's events.

A replica is taken over from its executor in three steps, so that no token is counted twice or lost. It is suspended and
gets no more plans. A fence is written at the end of its results, after which the old executor's late writes are
refused. Once the results have been read up to the fence, the replica is lost and its sequences run elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

from pagebus.actors.scheduler.events import (
    DetokenizerLost,
    DetokenizersLive,
    HostTierGrown,
    IngressLost,
    Input,
    ReplicaJoined,
    ReplicaSuspended,
)
from pagebus.bus.contract import START, EntryId, LeaseInfo
from pagebus.bus.streams import address_of, is_address

DEFAULT_BUDGET_TOKENS = 2048
DRAINED = "it has drained"
"""The reason why a replica is shut out whose executor ended as it was told to."""
CLIENTS = ("ingress", "jobs")
"""Kinds of actors that send requests and receive replies. In this module, "ingress" means both."""


@dataclass(slots=True)
class Member:
    """An executor that gets plans, or that is being removed. ``drains``: it ends as it was told to. ``rolled_back``:
    the bus was restarted after it joined, and may have lost results that the scheduler has read."""

    epoch: int
    suspended: bool = False
    drains: bool = False
    fenced: bool = False
    num_host_blocks: int = 0
    rolled_back: bool = False


class Membership:
    """The state of all actors as of the last look at the leases.

    Args:
        emit: receives events for the core.
        fence: writes the fence of (replica, epoch, reason).
    """

    def __init__(self, emit: Callable[[Input], None], fence: Callable[[str, int, str], None]) -> None:
        self.members: dict[str, Member] = {}
        self.joining: deque[ReplicaJoined] = deque()
        self.refused: dict[str, int] = {}
        """Executors that may not join (again), by the epoch of their lease."""
        self.positions: dict[str, dict[str, EntryId]] = {}
        self._emit = emit
        self._fence = fence
        self._detokenizers: dict[str, int] = {}
        self._taking: tuple[str, ...] = ()
        self._ingresses: dict[str, tuple[str, ...]] = {}
        """By address, the kinds that may be there: all of CLIENTS until its lease has been seen."""

    def expect(self, ingresses: Iterable[str], detokenizers: Iterable[str] = ()) -> None:
        """Register actors not seen here yet, so that their absence is noticed. Ingresses by address."""
        for address in filter(is_address, ingresses):
            self._ingresses.setdefault(address, CLIENTS)
        for name in detokenizers:
            self._detokenizers.setdefault(name, 0)

    @property
    def ingresses(self) -> Iterable[str]:
        """Addresses of the ingresses alive at the last look."""
        return self._ingresses.keys()

    @property
    def live_detokenizers(self) -> Iterable[str]:
        return self._detokenizers.keys()

    def deaf_to(self, replica: str) -> tuple[str, ...]:
        """Detokenizers that have not confirmed that they read this replica's results, or that may have lost some. One
        that has only reached those of an earlier executor may take their end for the end of all."""
        member = self.members.get(replica)
        if member is None or member.rolled_back:
            return tuple(self.positions)
        reached = ((name, told.get(f"results:{replica}", START)) for name, told in self.positions.items())
        return tuple(name for name, at in reached if at.epoch < member.epoch)

    def absent(self, leases: Iterable[LeaseInfo]) -> list[tuple[str, str]]:
        """(kind, name) of known actors without a live lease. They may only be frozen: an actor is given up only after
        its lease is revoked, so that it cannot take it back unaware."""
        known = [("executor", name) for name, member in self.members.items() if not member.fenced]
        known += [("detokenizer", name) for name in self._detokenizers]
        live = {(lease.kind, lease.name) for lease in leases}
        for address, kinds in self._ingresses.items():
            holders = [(kind, address.rpartition("@")[0]) for kind in kinds]
            known += holders if live.isdisjoint(holders) else []
        return [who for who in dict.fromkeys(known) if who not in live]

    def look(self, leases: Iterable[LeaseInfo], revoked: Container[tuple[str, str]] = ()) -> None:
        """Apply the live leases, and that those in ``revoked`` (kind, name) will not come back."""
        leases = list(leases)
        self._look_at_executors({each.name: each for each in leases if each.kind == "executor"}, revoked)
        self._look_at_detokenizers({each.name: each for each in leases if each.kind == "detokenizer"}, revoked)
        self._look_at_ingresses([each for each in leases if each.kind in CLIENTS], revoked)

    def distrust(self, replica: str, reason: str) -> None:
        """Shut out the executor of a replica."""
        member = self.members.get(replica)
        if member is None or member.fenced:
            return
        self._suspend(replica, member)
        member.fenced = True
        self.refused[replica] = member.epoch  # it may live on, and must not come back before it notices
        self._fence(replica, member.epoch, reason)

    def bus_restarted(self) -> None:
        """Note that others may have lost what was read here. Their writers end then, if they have not died already."""
        for member in self.members.values():
            member.rolled_back = True

    def lost(self, replica: str) -> None:
        """Remove a replica whose results have been read to the end. A new executor may use its name."""
        self.members.pop(replica, None)

    def _look_at_executors(self, leases: dict[str, LeaseInfo], revoked: Container[tuple[str, str]]) -> None:
        for name, member in list(self.members.items()):
            lease = leases.get(name)
            if lease is None:
                if ("executor", name) in revoked:
                    self.distrust(name, DRAINED if member.drains else "its lease has ended")
            elif lease.epoch != member.epoch:
                self.distrust(name, "a new executor has taken its place")
            elif lease.info.get("state") == "draining":  # not "loading", which a server set back may say once more
                member.drains = True
                self._suspend(name, member, drains=True)
            elif (num_host_blocks := _count(lease, "num_host_blocks")) > member.num_host_blocks:
                member.num_host_blocks = num_host_blocks
                self._grow(name, num_host_blocks)
        for name, lease in leases.items():
            if name in self.members or lease.info.get("state") != "ready" or self.refused.get(name) == lease.epoch:
                continue
            joined = _capacities(lease)
            if joined is None:
                continue
            self.members[name] = Member(lease.epoch, num_host_blocks=joined.num_host_blocks)
            self.joining.append(joined)

    def _grow(self, name: str, num_host_blocks: int) -> None:
        """Apply a replica's larger number of host blocks, also if it has not joined the core yet."""
        for at, joined in enumerate(self.joining):
            if joined.replica == name:
                self.joining[at] = replace(joined, num_host_blocks=num_host_blocks)
                return
        self._emit(HostTierGrown(name, num_host_blocks))

    def _suspend(self, name: str, member: Member, *, drains: bool = False) -> None:
        if not member.suspended:
            member.suspended = True
            self._emit(ReplicaSuspended(name, drains))

    def _look_at_ingresses(self, leases: list[LeaseInfo], revoked: Container[tuple[str, str]]) -> None:
        """Leases of several kinds may have the same name."""
        live = {address_of(each.name, each.epoch): (each.kind,) for each in leases}
        held = {(each.kind, each.name) for each in leases}
        for address in sorted(self._ingresses.keys() - live.keys()):
            holders = [(kind, address.rpartition("@")[0]) for kind in self._ingresses[address]]
            if not held.isdisjoint(holders) or all(holder in revoked for holder in holders):
                del self._ingresses[address]
                self._emit(IngressLost(address))
        self._ingresses |= live

    def _look_at_detokenizers(self, leases: dict[str, LeaseInfo], revoked: Container[tuple[str, str]]) -> None:
        taking = tuple(sorted(name for name, lease in leases.items() if lease.info.get("state") == "ready"))
        for name, epoch in list(self._detokenizers.items()):
            now = leases.get(name)
            if now.epoch != epoch != 0 if now is not None else ("detokenizer", name) in revoked:
                del self._detokenizers[name]
                self.positions.pop(name, None)
                self._emit(DetokenizerLost(name))
                self._taking = ()  # told again below: the core has struck it off
        for name in taking:
            self._detokenizers[name] = leases[name].epoch
        for name, lease in leases.items():
            self.positions[name] = positions_of(lease)
        for name in self.positions.keys() - leases.keys() - self._detokenizers.keys():
            del self.positions[name]  # it has never taken sequences, so nothing waits for it
        if taking != self._taking:
            self._taking = taking
            self._emit(DetokenizersLive(taking))


def _capacities(lease: LeaseInfo) -> ReplicaJoined | None:
    """The capacities in an executor's lease; None if incomplete."""
    names = ("num_blocks", "block_size", "max_num_seqs", "max_model_len")
    values = [lease.info.get(name) for name in names]
    if not all(isinstance(value, int) for value in values):
        return None
    budget = lease.info.get("max_num_batched_tokens")
    num_blocks, block_size, max_num_seqs, max_model_len = (int(str(value)) for value in values)
    return ReplicaJoined(
        replica=lease.name,
        epoch=lease.epoch,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=budget if isinstance(budget, int) else DEFAULT_BUDGET_TOKENS,
        num_host_blocks=_count(lease, "num_host_blocks"),
        block_bytes=_count(lease, "block_bytes"),
        copy_bytes_per_s=_rate(lease, "copy_bytes_per_s"),
        prefill_tokens_per_s=_rate(lease, "prefill_tokens_per_s"),
        windowed_pages=_count(lease, "windowed_pages"),
        windowed_tokens=_count(lease, "windowed_tokens"),
        num_drafts=_count(lease, "num_drafts"),
        max_loras=_count(lease, "max_loras"),
        most_loras=_count(lease, "most_loras"),
        ranks=max(1, _count(lease, "world")),
        num_disk_blocks=_count(lease, "num_disk_blocks"),
        stages=max(1, _count(lease, "stages")),
        kv_kind=_text(lease, "kv_kind"),
        kv_address=_text(lease, "kv_address"),
        kv_host=_text(lease, "kv_host"),
    )


def _count(lease: LeaseInfo, name: str) -> int:
    value = lease.info.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _rate(lease: LeaseInfo, name: str) -> float:
    value = lease.info.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0


def _text(lease: LeaseInfo, name: str) -> str:
    value = lease.info.get(name)
    return value if isinstance(value, str) else ""


def positions_of(lease: LeaseInfo) -> dict[str, EntryId]:
    """Positions up to which a detokenizer has read, by ``results:<replica>``."""
    told = lease.info.get("positions")
    return {str(name): EntryId.parse(str(at)) for name, at in told.items()} if isinstance(told, dict) else {}
