"""What a stage of a pipeline gets from the stage before it, and what it leaves to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.actors.model.shards.stage import Stage


@dataclass(slots=True)
class Passage:
    """The residual stream of one pass [T, H], as it enters the ``stage`` and as it leaves it. While nothing enters, as
    in made-up steps before the stages are connected, a pass begins with zeros."""

    stage: Stage
    entering: torch.Tensor | None = None
    leaving: torch.Tensor | None = None

    def enter(self, count: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The stream [count, hidden] with which a pass begins. It may be written to."""
        entering, self.entering = self.entering, None
        return torch.zeros((count, hidden), dtype=dtype, device=device) if entering is None else entering
