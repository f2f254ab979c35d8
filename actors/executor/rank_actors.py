"""The ranks of a replica as actors: rank 0 is the executor for all other actors, and the others follow the same plans.

All ranks read the same log of plans. When one is lost, the whole group ends and starts anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from msgspec.structs import replace

from pagebus.actors.executor.actor import ExecutorActor
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.ranks.group import (
    GLOO,
    LOOPBACK,
    NCCL,
    RANK,
    RECORD_TTL_S,
    Record,
    carrier_of,
    check_alike,
    description,
    lost_rank,
    own_address,
    rank_name,
    ranks_there,
    record_state,
    replica_of,
)
from pagebus.actors.executor.ranks.links import avoid_multicast
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.runtime.actor import RETRY_S, describe
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import Bus, BusError, BusUnavailable, LeaseInfo
from pagebus.bus.messages import AdapterRead, FromExecutor, PullReport, StepResult
from pagebus.kernels.common.target import gpu_id

JOIN_LOOK_S = 0.1
LOOKS_PER_LEASE = 5
PATIENCE = 3
"""Looks without a lease after which a rank counts as lost: a restarted server of the bus may miss it for one."""
HANG_S = 20.0
"""Longest wait for another rank within a step."""


def meet(settings: Settings, where: str, hostname: str, carrier: str, generation: int) -> Any:
    """The exchange with the other ranks, which connects once the weights are loaded. Imports torch."""
    from pagebus.actors.executor.ranks.gloo import open_store
    from pagebus.actors.executor.ranks.layout import comm_of

    timeout_s = min(HANG_S, settings.step_timeout_s)
    store = partial(open_store, where, settings.rank, settings.num_ranks)
    if carrier == GLOO:
        return comm_of(settings, store, hostname, generation, timeout_s)
    over = partial(_between_gpus, settings, carrier, timeout_s)
    return comm_of(settings, store, hostname, generation, timeout_s, over)


def _between_gpus(settings: Settings, carrier: str, timeout_s: float, host: Any) -> Any:
    """The exchange of GPUs, beside that of their hosts. Imports Triton."""
    import torch

    from pagebus.actors.executor.device.device import resolve_device
    from pagebus.actors.executor.ranks.nccl import NcclComm
    from pagebus.actors.executor.ranks.peers import PeerComm

    device = resolve_device(settings)
    torch.cuda.set_device(device)  # of this thread, so that nothing is made on another rank's GPU
    if carrier == NCCL:
        return NcclComm(host, device, invariant=settings.deterministic)
    nccl = NcclComm(host, device) if host.size > 2 and not settings.deterministic else None
    return PeerComm(host, device, patience_s=timeout_s, nccl=nccl)


class RankActor(ExecutorActor):
    """The base of all ranks: loads its part of the model, and watches the ranks on which it depends."""

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        if settings.actor_name is None:
            raise SettingsError("--actor-name is needed: the ranks of an executor find each other by its name")
        avoid_multicast()
        super().__init__(settings, bus, name)
        self._address = own_address(settings.bus)
        self._needs: dict[str, str] = {}
        self._gpu = ""
        self._step_timeout_s = min(HANG_S, settings.step_timeout_s)

    def lease_info(self) -> dict[str, Any]:
        """The executor's fields; the rank, the number of ranks, the address, and digests of what it computes with."""
        told = {"rank": self.settings.rank, "world": self.settings.num_ranks, "address": self._address}
        told["gpu"] = self._gpu
        return {**super().lease_info(), **told, "needs": self._needs}

    def _own_part(self, config: ModelConfig) -> ModelConfig:
        self._needs = description(self.settings, config)
        if self.settings.device != "cpu":
            self._gpu = gpu_id(self.settings.rank)
        return rank_config(config, self.settings)

    async def _watch_leases(self, kind: str, epochs: dict[str, int]) -> None:
        """End with an error when one of the leases is lost, or without as soon as one is missed if the group has
        ended."""
        missed: dict[str, int] = {}
        while True:
            await asyncio.sleep(self.settings.lease_ttl_s / LOOKS_PER_LEASE)
            with contextlib.suppress(BusUnavailable):  # the next look will do
                leases = await self.bus.leases(kind)
                lost = lost_rank(epochs, leases, missed, PATIENCE)
                if (lost or any(missed.values())) and await self._has_ended():
                    return
                if lost is not None:
                    self._engine_failed(EngineError(f"{lost} is gone, and no rank goes on without it"))
                    return
                self._others_live([lease for lease in leases if lease.name in epochs])

    async def _has_ended(self) -> bool:
        """Whether the group has ended on purpose; if so, this rank ends too."""
        return False

    def _others_live(self, leases: list[LeaseInfo]) -> None:
        """Called with the live leases of the ranks on which it depends."""


class LeadingRank(RankActor):
    """Rank 0: holds the executor's lease, writes the results, and writes the record of its group."""

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self._folder: Path | None = None
        self._record: Record | None = None

    async def _join(self, config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
        own = self._own_part(config)
        self.renew_soon()
        others = await self._wait_for_ranks()
        check_alike(self._needs, others)
        addresses = {self._address, *(str(lease.info.get("address")) for lease in others)}
        where, hostname = await asyncio.to_thread(self._place, len(addresses) == 1)
        gpus, plain = [str(lease.info.get("gpu", "")) for lease in others], self.settings.disable_custom_all_reduce
        carrier = carrier_of([self._gpu, *gpus], one_host=len(addresses) == 1, plain=plain)
        comm = await asyncio.to_thread(meet, self.settings, where, hostname, carrier, self.epoch)
        self._record = Record(self.epoch, tuple(lease.epoch for lease in others), self._position, where, carrier)
        self.log.info("ranks have met", world=self.settings.num_ranks, carrier=carrier)
        await self._unless_away(self._write_record)
        self.spawn(self._watch_leases(RANK, {lease.name: lease.epoch for lease in others}), "ranks")
        return own, {"comm": comm}

    async def _write_record(self, *, ended: bool = False) -> None:
        if self._record is not None:
            state = {**self._record.as_state(), "ended": ended}
            await self.bus.put_state(record_state(self.replica), state, ttl_s=RECORD_TTL_S)

    async def _wait_for_ranks(self) -> list[LeaseInfo]:
        told = False
        while True:
            leases = await self._unless_away(partial(self.bus.leases, RANK))
            others = ranks_there(leases or (), self.replica, self.settings.num_ranks)
            if others is not None:
                return others
            if not told:
                told = True
                self.log.info("waiting for the other ranks", world=self.settings.num_ranks)
            await asyncio.sleep(JOIN_LOOK_S)

    def _place(self, one_host: bool) -> tuple[str, str]:
        """The store at which ranks meet, and this rank's address. On one host it is a file, so no port is open."""
        if one_host:
            self._folder = Path(tempfile.mkdtemp(prefix="pagebus-ranks-"))
            return f"file:{self._folder / 'store'}", LOOPBACK
        return f"tcp:{self._address}:{free_port(self._address)}", self._address

    def _others_live(self, leases: list[LeaseInfo]) -> None:
        if any(lease.info.get("state") == "draining" for lease in leases):
            self.request_drain()

    async def drain(self) -> None:
        """Also record that the group ends on purpose."""
        await super().drain()
        with contextlib.suppress(BusUnavailable):  # they end all the same
            await self._write_record(ended=True)

    async def stop(self) -> None:
        """Also remove the folder in which ranks met."""
        await super().stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class FollowingRank(RankActor):
    """Any other rank: computes the same plans, and exchanges tensors only with the other ranks."""

    kind: ClassVar[str] = RANK

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        self._replica = replica_of(name, settings.rank)
        self._generation = 0
        super().__init__(settings, bus, rank_name(self._replica, settings.rank))
        self._over = asyncio.Event()

    @property
    def replica(self) -> str:
        """Rank 0's name."""
        return self._replica

    @property
    def generation(self) -> int:
        """The epoch of rank 0's lease; 0 before there is a group."""
        return self._generation

    def lease_info(self) -> dict[str, Any]:
        """The fields of all ranks, and the generation of its group."""
        return {**super().lease_info(), "generation": self._generation}

    async def _join(self, config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
        own = self._own_part(config)
        self.renew_soon()
        record = await self._wait_for_record()
        self._position, self._generation = record.start, record.generation
        self.renew_soon()
        hostname = LOOPBACK if record.store.startswith("file:") else self._address
        comm = await asyncio.to_thread(meet, self.settings, record.store, hostname, record.carrier, record.generation)
        self.spawn(self._watch_leases("executor", {self._replica: record.generation}), "leader")
        return own, {"comm": comm}

    async def _wait_for_record(self) -> Record:
        """The record of the group that includes this life of the rank."""
        while True:
            states = await self._unless_away(partial(self.bus.get_state, record_state(self._replica)))
            if states and states[0] is not None:
                record = Record.of_state(states[0])
                if record.has(self.settings.rank, self.epoch):
                    return record
            await asyncio.sleep(JOIN_LOOK_S)

    async def serve(self) -> None:
        """Pass plans to the engine as they arrive, until rank 0 has ended: in a drain its steps still need this
        rank."""
        while not self._over.is_set():
            await self._read_plans()
            if self.bus_is_away:
                await asyncio.sleep(RETRY_S)

    async def _has_ended(self) -> bool:
        [state] = await self.bus.get_state(record_state(self._replica))
        if state is None or not state.get("ended") or state["generation"] != self._generation:
            return False
        self.request_drain()
        self._over.set()
        return True

    def _publish(self, result: FromExecutor) -> None:
        """Results are rank 0's to write; what becomes of adapters and pulls each rank says for itself."""
        if isinstance(result, StepResult):
            self._count(result)
        elif isinstance(result, AdapterRead):
            if result.error:
                self.log.warning("this rank cannot read an adapter", digest=result.digest, error=result.error)
            super()._publish(replace(result, rank=self.settings.rank))
        elif isinstance(result, PullReport):
            super()._publish(result)

    async def bequeath(self, error: BaseException) -> None:
        """Only log the error: rank 0 writes the fence."""
        if not isinstance(error, BusError):
            self.log.error("this rank ends its group", error=describe(error))


def free_port(address: str) -> int:
    """A free port of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
