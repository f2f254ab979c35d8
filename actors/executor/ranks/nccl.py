"""NCCL among the GPUs of a group, for sums of more bytes than peer memory is quick with."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

DISTRIBUTED: Any = torch.distributed
TIMEOUT_S = 60.0


class NcclGroup:
    """A group of its own, beside torch's global one, connected when constructed. Works on the current stream, also
    while that is captured.

    Args:
        store: which only this group uses.

    Raises:
        RuntimeError: NCCL cannot connect the ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        options = DISTRIBUTED.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        self._group: Any = DISTRIBUTED.ProcessGroupNCCL(store, rank, size, options)
        self.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over all ranks, in place: the same bits on all of them, rounded after each addition."""
        self._group.allreduce([x]).wait()
        return x
