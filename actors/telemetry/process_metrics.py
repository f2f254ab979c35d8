"""Metrics of an actor's process: CPU time, memory and open files."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from pagebus.actors.telemetry.metrics import Metrics

FILES_EVERY_S = 10.0
"""Counting open files takes a microsecond for each: an ingress may have ten thousand."""


class ProcessMetrics:
    """CPU time, memory and files of this process, under the names that Prometheus's own clients use."""

    def __init__(self, metrics: Metrics, actor: str) -> None:
        gauge = metrics.gauge
        self._cpu = metrics.counter("process_cpu_seconds_total", "CPU time of the process in seconds.", actor=actor)
        self._memory = gauge("process_resident_memory_bytes", "Resident memory of the process.", actor=actor)
        self._files = gauge("process_open_fds", "Open file descriptors of the process.", actor=actor)
        self._files_counted_s = -FILES_EVERY_S
        self._most_files = gauge("process_max_fds", "Most file descriptors the process may have open.", actor=actor)
        name, text = "process_start_time_seconds", "When this actor's life began, in seconds since 1970."
        gauge(name, text, actor=actor).set(time.time())

    def measure(self) -> None:
        """Bring the metrics up to date: tens of microseconds."""
        self._cpu.rise_to(time.process_time())
        self._memory.set(resident_bytes())
        if (now_s := time.monotonic()) - self._files_counted_s >= FILES_EVERY_S:
            self._files_counted_s = now_s
            self._files.set(open_files())
            self._most_files.set(max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def open_files() -> int:
    """Open file descriptors of this process; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0
