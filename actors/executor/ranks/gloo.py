"""Ranks over gloo: on CPUs, and where several have one GPU. Only plain bytes are exchanged: nothing is pickled."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError

DISTRIBUTED: Any = torch.distributed  # whose types do not say what it has
GLOO = DISTRIBUTED.ProcessGroupGloo
"""A group of its own, beside torch's global one: a process may hold several ranks."""
CONNECT_S = 600.0
"""Longest wait for the other ranks at start, while they read their weights."""


class GlooComm(Comm):
    """One of ``size`` ranks that meet at a ``store``, which is made when they are ready to meet. What is on a GPU
    passes through the host, which waits for it.

    Args:
        hostname: the address of this host under which the other ranks reach it.
        timeout_s: longest wait for the other ranks within a step.
    """

    captures = False

    def __init__(self, rank: int, size: int, store: Callable[[], Any], hostname: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._make_store, self._hostname, self._timeout_s = store, hostname, timeout_s
        self._group: Any = None
        self.store: Any = None
        """Where the ranks have met, for what they arrange beside this."""

    def connect(self) -> None:
        """Meet the other ranks at the store."""
        options = GLOO._Options()
        options._devices = [GLOO.create_device(hostname=self._hostname)]
        options._timeout = timedelta(seconds=CONNECT_S)
        try:
            self.store = self._make_store()
            self._group = GLOO(self.store, self.rank, self.size, options)
            self.all_gather(torch.zeros(1))
            self._group._set_default_timeout(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise EngineError(f"rank {self.rank} of {self.size} does not find the others: {_cause(error)}") from error

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As in :class:`Comm`."""
        if self._group is None:
            raise EngineError(f"rank {self.rank} has not met the others yet")
        if not x.numel():  # the last layer of a step that samples nothing
            return x.new_empty((self.size, *x.shape))
        mine = x.contiguous().view(-1).view(torch.uint8).cpu()
        gathered = torch.empty((self.size, len(mine)), dtype=torch.uint8)
        try:
            self._group.allgather([list(gathered)], [mine]).wait()
        except RuntimeError as error:
            raise EngineError(f"rank {self.rank} of {self.size} has lost another rank: {_cause(error)}") from error
        return gathered.to(x.device).view(x.dtype).view(self.size, *x.shape)

    def close(self) -> None:
        """Drop the connections; ranks that wait for this one fail at once."""
        self._group = None


def open_store(where: str, rank: int, size: int) -> Any:
    """The store at which ranks meet: ``file:<path>`` or ``tcp:<host>:<port>``, which is rank 0's. Raises
    RuntimeError."""
    kind, _, rest = where.partition(":")
    if kind == "file":
        return DISTRIBUTED.FileStore(rest, size)
    host, _, port = rest.rpartition(":")
    limit = timedelta(seconds=CONNECT_S)
    return DISTRIBUTED.TCPStore(host, int(port), size, rank == 0, timeout=limit, wait_for_workers=False)


def _cause(error: RuntimeError) -> str:
    """The sentence of gloo's text that says what happened."""
    text = str(error).partition("\n")[0].partition(" This is typically")[0]
    return text.partition("] ")[2] if text.startswith("[/") else text
