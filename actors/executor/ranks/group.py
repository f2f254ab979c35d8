"""How the ranks of a replica find each other, over the bus alone.

Each rank takes a lease with digests of what it would compute with. Rank 0 waits for all leases, compares them, and
writes the record of the group: the epochs of its leases, where tensors are exchanged, and from which plan on all read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.runtime.version import version
from pagebus.actors.settings import GROUPS, Settings, SettingsError
from pagebus.bus.contract import EntryId, LeaseInfo

RANK = "rank"
"""The kind of leases of all ranks but rank 0, whose lease is the executor's."""
RECORD_TTL_S = 600.0
"""Ranks read the record at once. A stale one does no harm, because it names the epochs of the leases."""
LOOPBACK = "127.0.0.1"
GLOO, NCCL, PEERS = "gloo", "nccl", "peers"
"""How ranks exchange tensors: through the host, between GPUs, or by writing into each other's memory."""
OWN_SETTINGS = (
    "model", "tokenizer", "served_model_name", "threads", "lora_modules", "lora_resolver_cache_dir"
)  # fmt: skip
"""Settings that may differ between ranks: paths on their hosts, and names for clients."""


def record_state(replica: str) -> str:
    """The key on the bus of a replica's record."""
    return f"group:{replica}"


def rank_name(replica: str, rank: int) -> str:
    """The name of a rank; rank 0 has the replica's."""
    return f"{replica}.{rank}" if rank else replica


def replica_of(name: str, rank: int) -> str:
    """The replica of a rank, by the rank's name or the replica's own."""
    return name.removesuffix(f".{rank}") if rank else name


def description(settings: Settings, config: ModelConfig) -> dict[str, str]:
    """Digests of what must be the same on all ranks, by name: version, settings, model."""
    groups = ("engine", "memory", "model")
    names = [field.name for group in groups for field in dataclasses.fields(GROUPS[group])]
    values = [(name, getattr(settings, name)) for name in names if name not in OWN_SETTINGS]
    sizes = settings.tensor_parallel_size, settings.pipeline_parallel_size
    values.append(("ranks", (*sizes, settings.enable_expert_parallel)))
    return {"version": version(), "settings": _digest(values), "model": _digest(config)}


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def own_address(bus_url: str | None) -> str:
    """The address from which this host reaches the bus, under which other ranks may reach it."""
    first = urlsplit(bus_url or "").netloc.rpartition("@")[2].split(",")[0]
    parts = urlsplit(f"//{first}")
    if not parts.hostname:
        return LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port or 6379, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of datagrams: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK


@dataclass(frozen=True, slots=True)
class Record:
    """A group: ``generation`` is the epoch of rank 0's lease, ``epochs`` are those of the other ranks', in their order;
    all read plans behind ``start``. They meet at ``store``, of :func:`~pagebus.actors.executor.ranks.gloo.open_store`,
    and exchange tensors over ``carrier``.
    """

    generation: int
    epochs: tuple[int, ...]
    start: EntryId
    store: str
    carrier: str = GLOO

    def has(self, rank: int, epoch: int) -> bool:
        """Whether this life of a rank belongs to the group; the record may be of an earlier one, with fewer ranks."""
        return rank <= len(self.epochs) and self.epochs[rank - 1] == epoch

    def as_state(self) -> dict[str, Any]:
        """As it is on the bus."""
        return {
            "generation": self.generation, "epochs": list(self.epochs), "start": str(self.start), "store": self.store,
            "carrier": self.carrier,
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Record:
        """From the bus."""
        start, carrier = EntryId.parse(state["start"]), state.get("carrier", GLOO)
        return cls(state["generation"], tuple(state["epochs"]), start, state["store"], carrier)


def carrier_of(gpus: Sequence[str], *, one_host: bool, plain: bool) -> str:
    """How ranks with these ``gpus`` exchange tensors; "" is a CPU. GPUs want one rank each. ``plain``: by libraries
    alone."""
    if not all(gpus) or len(set(gpus)) < len(gpus):
        return GLOO
    return PEERS if one_host and not plain else NCCL


def ranks_there(leases: Sequence[LeaseInfo], replica: str, world: int) -> list[LeaseInfo] | None:
    """The leases of ranks 1.. of a replica, once all are there and wait for a group."""
    waiting = {
        lease.name: lease for lease in leases if lease.kind == RANK and lease.info.get("needs") and not _joined(lease)
    }
    names = [rank_name(replica, rank) for rank in range(1, world)]
    return [waiting[name] for name in names] if all(name in waiting for name in names) else None


def _joined(lease: LeaseInfo) -> bool:
    return bool(lease.info.get("generation"))


def check_alike(own: Mapping[str, str], others: Sequence[LeaseInfo]) -> None:
    """Compare digests with those in the leases of ranks 1, 2, ...

    Raises:
        SettingsError: a rank would compute something else; the text names it.
    """
    for rank, lease in enumerate(others, 1):
        told = lease.info.get("needs")
        assert isinstance(told, dict)
        for what, value in own.items():
            if told.get(what) != value:
                raise SettingsError(
                    f"rank {rank} on {lease.info.get('host')} has another {what} than rank 0: {told.get(what)}, "
                    f"not {value}; ranks of one model need the same"
                )


def lost_rank(
    epochs: Mapping[str, int], leases: Sequence[LeaseInfo], missed: dict[str, int], patience: int
) -> str | None:
    """Which of the names in ``epochs`` has another life, or has had no lease in ``patience`` looks; ``missed`` counts
    them."""
    live = {lease.name: lease.epoch for lease in leases}
    for name, epoch in epochs.items():
        missed[name] = 0 if name in live else missed.get(name, 0) + 1
        if live.get(name, epoch) != epoch or missed[name] >= patience:
            return name
    return None
