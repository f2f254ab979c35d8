"""Engines of the stages of a pipeline in one process, driven as if they were one."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pagebus.actors.executor.engine import Engine
from pagebus.actors.executor.memory.groups import with_groups
from pagebus.actors.executor.ranks.layout import comm_of
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings import Settings
from tests.helpers.engine_driver import Driver
from tests.helpers.ranks.rank_driver import LOOPBACK, Group
from tests.helpers.waiting import LIMIT_S

GENERATION = 7


class StageDriver(Driver):
    """A driver of ``stages`` of ``width`` ranks each; ``engines`` are theirs, rank 0's first, and any rank's failure is
    the result."""

    def __init__(self, path: Path, stages: int, width: int = 1, *, grouped: bool = False, **settings: Any) -> None:
        self.settings = Settings(
            model=str(path), pipeline_parallel_size=stages, tensor_parallel_size=width, **settings
        )  # fmt: skip
        self.results = queue.Queue()
        whole = with_quantization(self.settings, ModelConfig.load(path))
        whole = with_groups(self.settings, whole) if grouped else whole
        store, self.engines = dist.HashStore(), []
        for rank in range(stages * width):
            own = self.settings.replace(rank=rank)
            comm = comm_of(own, lambda: store, LOOPBACK, GENERATION, LIMIT_S)
            self.engines.append(
                Engine(
                    own, rank_config(whole, own), path=path, comm=comm, on_error=self.results.put,
                    on_result=self.results.put if rank == 0 else lambda result: None,
                )
            )  # fmt: skip
        self.group = Group(self.engines)
        self.engine = self.group  # type: ignore[assignment]  # all that a driver asks of an engine
        self.info = self.group.start().result(LIMIT_S)
        self.epoch = 0
