"""What a stage of a pipeline gets from the stage before it, and what it leaves to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.actors.model.shards.stage import Stage


@dataclass(slots=True)
class Passage:
    """The residual stream of one pass [T, H], as it enters the ``stage``, and as it leaves it, until the next pass.
    While nothing enters, as in made-up steps before the stages are connected, a pass begins with zeros."""

    stage: Stage
    entering: torch.Tensor | None = None
    leaving: torch.Tensor | None = None
    place: torch.Tensor | None = None
    """On a GPU: where streams enter [most tokens, H], for passes from graphs too. What is behind a step's tokens there
    is of steps before it."""

    def reserve(self, most_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """From here on, streams of up to ``most_tokens`` enter at one place, unless the stage begins with tokens."""
        if not self.stage.first:
            self.place = torch.zeros((most_tokens, hidden), dtype=dtype, device=device)

    def bring(self, stream: torch.Tensor) -> None:
        """The next pass begins with ``stream`` [T, H]."""
        if self.place is None:
            self.entering = stream
        else:
            self.place[: len(stream)].copy_(stream, non_blocking=True)

    def leave(self, hidden: torch.Tensor) -> None:
        """A pass ends with these states."""
        self.leaving = hidden

    def take(self) -> torch.Tensor | None:
        """What a pass has left, once."""
        leaving, self.leaving = self.leaving, None
        return leaving

    def enter(self, count: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The stream [count, hidden] with which a pass begins. It may be written to."""
        if self.place is not None:
            return self.place[:count].clone()
        entering, self.entering = self.entering, None
        return torch.zeros((count, hidden), dtype=dtype, device=device) if entering is None else entering
