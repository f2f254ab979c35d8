"""The exchange of a rank of a pipeline: sums with the ranks of its stage, messages with its neighbours in the ring."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.ranks.ring import Ring


class StagedComm(Comm):
    """As one of the ranks of a stage, which exchange over ``stage``; ``world`` are the ranks of all stages."""

    def __init__(self, world: Comm, stage: Comm, ring: Ring) -> None:
        self.rank, self.size = stage.rank, stage.size
        self.ring = ring
        self._world, self._stage = world, stage

    def connect(self) -> None:
        """Meet all ranks, then those of the stage, then both neighbours. Raises EngineError."""
        self._world.connect()
        self._stage.connect()
        self.ring.connect(self._world)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Over the stage, see :class:`Comm`."""
        return self._stage.all_gather(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Over the stage, see :class:`Comm`."""
        return self._stage.all_reduce(x)

    def least(self, value: float) -> float:
        """Of the ranks of all stages, see :class:`Comm`."""
        return self._world.least(value)

    def close(self) -> None:
        """Leave all of them."""
        self.ring.close()
        self._stage.close()
        self._world.close()
