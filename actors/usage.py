"""What an actor's process takes of its machine, as metrics."""

from __future__ import annotations

import os
import time
from pathlib import Path

from actors.metrics import Metrics


class Usage:
    """CPU time and memory of this process, under the names that Prometheus's own clients use."""

    def __init__(self, metrics: Metrics, actor: str) -> None:
        self._cpu = metrics.counter("process_cpu_seconds_total", "CPU time of the process in seconds.", actor=actor)
        self._memory = metrics.gauge("process_resident_memory_bytes", "Resident memory of the process.", actor=actor)

    def measure(self) -> None:
        """Bring the metrics up to date: tens of microseconds."""
        self._cpu.inc(time.process_time() - self._cpu.value)
        self._memory.set(resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
