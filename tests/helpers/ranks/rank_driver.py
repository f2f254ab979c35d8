"""Engines of several ranks in one process, over gloo, driven as if they were one."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.engine import Engine
from pagebus.actors.executor.loading.loaded import EngineInfo
from pagebus.actors.executor.ranks.gloo import GlooComm
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.local import local_config
from pagebus.actors.settings import Settings
from pagebus.bus.messages import FromExecutor, PullReport, StepPlan
from tests.helpers.engine_driver import Driver
from tests.helpers.waiting import LIMIT_S

LOOPBACK = "127.0.0.1"


def meeting(world: int) -> list[Comm]:
    """Ranks of one process that will meet."""
    store = dist.HashStore()
    return [GlooComm(rank, world, lambda: store, LOOPBACK, LIMIT_S) for rank in range(world)]


class Group:
    """Engines that get the same plans; what rank 0 says counts."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines

    def start(self) -> Future[EngineInfo]:
        """All load; when they are ready, the future is rank 0's."""
        ready = [engine.start() for engine in self.engines]
        for each in ready[1:]:
            each.result(LIMIT_S)
        return ready[0]

    def submit(self, plan: StepPlan, scheduler_epoch: int) -> None:
        """The plan to each rank."""
        for engine in self.engines:
            engine.submit(plan, scheduler_epoch)

    @property
    def num_occupied_slots(self) -> int:
        """Of rank 0."""
        return self.engines[0].num_occupied_slots

    @property
    def num_host_blocks(self) -> int:
        """Of the rank with the fewest."""
        return min(engine.num_host_blocks for engine in self.engines)

    def stop(self) -> bool:
        """Whether all have ended."""
        stopped = [engine.stop() for engine in self.engines]
        return all(stopped)


class RankDriver(Driver):
    """A driver of ``world`` ranks; ``engines`` are theirs, and any rank's failure is the result."""

    def __init__(self, path: Path, world: int, comms: list[Comm] | None = None, **settings: Any) -> None:
        self.settings = Settings(model=str(path), **settings)
        self.results = queue.Queue()
        whole = with_quantization(self.settings, ModelConfig.load(path))
        self.engines = [
            Engine(
                self.settings, local_config(whole, rank, world, by_expert=self.settings.enable_expert_parallel),
                path=path, comm=comm, on_error=self.results.put,
                on_result=self.results.put if rank == 0 else self._take_pulls,
            )
            for rank, comm in enumerate(comms or meeting(world))
        ]  # fmt: skip
        self.group = Group(self.engines)
        self.engine = self.group  # type: ignore[assignment]  # all that a driver asks of an engine
        self.info = self.group.start().result(LIMIT_S)
        self.epoch = 0

    def _take_pulls(self, result: FromExecutor) -> None:
        """Of other ranks than the first, only what they say of pulls is a result."""
        if isinstance(result, PullReport):
            self.results.put(result)  # type: ignore[arg-type]
