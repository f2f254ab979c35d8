"""How many processors each part of a deployment keeps busy, which tells where a load lies."""

from __future__ import annotations

import time
from collections import Counter

import psutil

from tests.chaos.deployment import Deployment


class Processors:
    """Measures from now on. ``others``: the process id of those who make the load."""

    def __init__(self, deployment: Deployment, others: int) -> None:
        self._processes = {name: process for name, process in deployment.actors().items()}
        self._processes["redis"] = psutil.Process(deployment.redis.info("server")["process_id"])
        self._processes["bombers"] = psutil.Process(others)
        self._before_s, self._began_s = self._times_s(), time.monotonic()

    def _times_s(self) -> Counter[str]:
        """Processor time by kind, of its children too."""
        times_s: Counter[str] = Counter()
        for name, process in self._processes.items():
            for each in (process, *process.children(recursive=True)):
                used = each.cpu_times()
                times_s[name.partition("-")[0]] += used.user + used.system
        return times_s

    def told(self) -> str:
        """The busy ones, the busiest first."""
        took_s = time.monotonic() - self._began_s
        busy = {kind: (now_s - self._before_s[kind]) / took_s for kind, now_s in self._times_s().items()}
        ordered = sorted(busy.items(), key=lambda item: -item[1])
        return ", ".join(f"{kind} {share:.2f}" for kind, share in ordered if share >= 0.05)
