"""The exchange of tensors between the ranks of a group. Every rank makes the same calls in the same order, with the
same shapes, because these follow from the step plans alone.

On a GPU all that exchanges tensors takes and returns CUDA tensors, is launched on the current stream, never waits on
the host, and may be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pagebus.actors.executor.device.operations import AddNorm
    from pagebus.kernels.coded.rounding import RoundedTokens


class Comm(ABC):
    """The exchange of tensors between the ranks of a group. All methods belong to the device thread."""

    rank: int
    size: int
    captures = True
    """Whether exchanges may be captured in CUDA graphs."""
    leaves_rows_out = False
    """Whether :meth:`gather_rows` tells no more than what is wanted, although the device alone knows what that is."""
    captured_bytes = math.inf
    """The largest sum for which steps are cut into graphs of their pieces."""

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
        """The sum of x [...] over all ranks, in x's format: bitwise equal on all of them. x, which may be written
        to, is not used again. Here it is added up in float32 in the order of ranks. Raises EngineError if a rank is
        lost."""
        first, *others = self.all_gather(x)
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        result: torch.Tensor = total.to(x.dtype)
        return result

    def all_reduce_norm(
        self, add_norm: AddNorm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
        scale: float = 1.0, **options: Any,
    ) -> torch.Tensor | RoundedTokens:  # fmt: skip
        """``add_norm`` of the sum of x over all ranks: x [T, D], or float32 [S, T, D] whose sum over S is this rank's,
        times ``scale`` is added to ``residual`` [T, D] in place; the norm of that, as ``options`` say. A kernel that
        does all of it may stand in."""
        return add_norm(self.all_reduce(whole(x, residual)), residual, weight, eps, scale, **options)

    def gather_columns(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """x [R, W] of every rank beside each other: [R, sum of ``widths``], where rank r's W is ``widths[r]``."""
        missing = max(widths) - x.shape[1]
        parts = self.all_gather(torch.nn.functional.pad(x, (0, missing)) if missing else x)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def gather_rows(self, x: torch.Tensor, wanted: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """:meth:`gather_columns` of the rows that are not 0 in ``wanted`` [R] int32, which is the same on all ranks;
        the other rows may be anything."""
        return self.gather_columns(x, widths)

    def least(self, value: float) -> float:
        """The smallest ``value`` of any rank. Raises EngineError if a rank is lost."""
        return float(self.all_gather(torch.tensor([value], dtype=torch.float64)).min())

    def tell_all(self, text: str) -> list[str]:
        """The ``text`` of every rank, in the order of ranks. Raises EngineError if a rank is lost."""
        told = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(told)])).flatten().tolist()
        parts = self.all_gather(torch.nn.functional.pad(told, (0, max(lengths) - len(told))))
        return [bytes(part[: length - 1].numpy()).decode() for part, length in zip(parts, lengths, strict=True)]

    def check(self) -> None:  # noqa: B027
        """Look whether all exchanges so far, whose work on the device has ended, have had all ranks. Any thread.

        Raises:
            EngineStalled: one has waited for a rank in vain.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group without waiting for other ranks."""


def whole(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x [T, D], or the sum of its parts [S, T, D] in the format of ``residual``."""
    return x if x.dim() == 2 else x.sum(0).to(residual.dtype)


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
