"""The exchange of tensors between the ranks of a group. Every rank makes the same calls in the same order, with the
same shapes, because these follow from the step plans alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Comm(ABC):
    """The exchange of tensors between the ranks of a group. All methods belong to the device thread."""

    rank: int
    size: int

    @abstractmethod
    def connect(self) -> None:
        """Find the other ranks; nothing can be exchanged before. Takes as long as they load.

        Raises:
            EngineError: they were not found in time.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of every rank, in the order of ranks: [N, ...]. Raises EngineError if a rank is lost."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [...] over all ranks, in x's format, added up in float32 in the order of ranks: bitwise equal on
        all of them. Raises EngineError if a rank is lost."""
        first, *others = self.all_gather(x)
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        result: torch.Tensor = total.to(x.dtype)
        return result

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [R, W] of every rank beside each other: [R, sum of ``widths``], where rank r's W is ``widths[r]``."""
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1]))
        parts = self.all_gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def least(self, value: float) -> float:
        """The smallest ``value`` of any rank. Raises EngineError if a rank is lost."""
        return float(self.all_gather(torch.tensor([value], dtype=torch.float64)).min())

    @abstractmethod
    def close(self) -> None:
        """Leave the group without waiting for other ranks."""


class OneRank(Comm):
    """A replica of one rank, which exchanges nothing."""

    rank, size = 0, 1

    def connect(self) -> None:
        """There are no other ranks."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] -> [1, ...]."""
        return x.unsqueeze(0)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def close(self) -> None:
        """There is no group to leave."""


ONE_RANK = OneRank()
