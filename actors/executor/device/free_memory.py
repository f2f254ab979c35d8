"""Host memory that this process may still take: what the machine has left, a container's limit, and ``ulimit -v``."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> float:
    """The least of what each limit leaves; infinite where the system states none."""
    return min((_machine(proc), _address_space(proc), *_groups(proc, cgroups)))


def _machine(proc: Path) -> float:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return float("inf")  # not Linux: unknown


def _address_space(proc: Path) -> float:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return float("inf")
    try:
        used = int((proc / "self" / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return float("inf")
    return max(0.0, limit - used)


def _groups(proc: Path, cgroups: Path) -> Iterator[float]:
    """What the control groups of this process and those above them leave, of both versions."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if not controllers:
            yield from _path(cgroups, own, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _path(cgroups / "memory", own, *names)


def _path(root: Path, own: str, limit: str, usage: str, reclaimable: str) -> Iterator[float]:
    """A container sees its own group as the root, whatever path it is told: groups that are not there are skipped."""
    group = root / own.lstrip("/")
    for each in (group, *group.parents):
        if each == root.parent:
            return
        try:
            most, used = (each / limit).read_text(), int((each / usage).read_text())
            pairs = (line.split() for line in (each / "memory.stat").read_text().splitlines())
            cached = next((int(value) for name, value in pairs if name == reclaimable), 0)
        except (OSError, ValueError):
            continue
        if most.strip().isdigit():  # else "max"
            yield max(0.0, int(most) - used + cached)
