"""The exchange of a rank of a pipeline: sums with the ranks of its stage, messages with its neighbours in the ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.ranks.ring import Ring

if TYPE_CHECKING:
    from pagebus.actors.executor.device.operations import AddNorm
    from pagebus.kernels.coded.rounding import RoundedTokens


class StagedComm(Comm):
    """As one of the ranks of a stage, which exchange over ``stage``; ``world`` are the ranks of all stages."""

    def __init__(self, world: Comm, stage: Comm, ring: Ring) -> None:
        self.rank, self.size = stage.rank, stage.size
        self.ring, self.captures, self.captured_bytes = ring, stage.captures, stage.captured_bytes
        self.leaves_rows_out = stage.leaves_rows_out
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

    def all_reduce_norm(
        self, add_norm: AddNorm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        scale: float = 1.0, **options: Any,
    ) -> torch.Tensor | RoundedTokens:  # fmt: skip
        """Over the stage, see :class:`Comm`."""
        return self._stage.all_reduce_norm(add_norm, x, residual, weight, eps, scale, **options)

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Over the stage, see :class:`Comm`."""
        return self._stage.gather_columns(x, widths)

    def gather_rows(self, x: torch.Tensor, wanted: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Over the stage, see :class:`Comm`."""
        return self._stage.gather_rows(x, wanted, widths)

    def check(self) -> None:
        """Of the stage, see :class:`Comm`."""
        self._stage.check()

    def least(self, value: float) -> float:
        """Of the ranks of all stages, see :class:`Comm`."""
        return self._world.least(value)

    def tell_all(self, text: str) -> list[str]:
        """Of the ranks of all stages, see :class:`Comm`."""
        return self._world.tell_all(text)

    def close(self) -> None:
        """Leave all of them."""
        self.ring.close()
        self._stage.close()
        self._world.close()
