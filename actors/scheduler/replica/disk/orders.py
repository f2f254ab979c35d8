"""The disk orders of a replica's next plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagebus.actors.scheduler.kv.disk_pool import name_of
from pagebus.bus.messages import Int32Array


@dataclass(slots=True)
class DiskOrders:
    """Contents to be ``read`` and ``written``, with their host blocks, and names to be ``dropped``. ``command`` is the
    ``disk_order`` of :class:`StepPlan`, which comes first."""

    command: int = 0
    read: dict[bytes, int] = field(default_factory=dict)
    written: dict[bytes, int] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def ask(self, command: int) -> None:
        """Set the command that the executor carries out first."""
        self.command = command

    def drop(self, contents: Iterable[bytes]) -> None:
        """Have the executor delete these contents."""
        self.dropped += map(name_of, contents)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.command or self.read or self.written or self.dropped)

    def columns(self) -> dict[str, Any]:
        """The fields of :class:`StepPlan` with these orders."""
        if not self:
            return {}
        return {
            "disk_order": self.command,
            "disk_reads": tuple(map(name_of, self.read)),
            "disk_read_hosts": _hosts(self.read),
            "disk_writes": tuple(map(name_of, self.written)),
            "disk_write_hosts": _hosts(self.written),
            "disk_drops": tuple(self.dropped),
        }


def _hosts(blocks: dict[bytes, int]) -> Int32Array:
    return np.fromiter(blocks.values(), np.int32, len(blocks))
