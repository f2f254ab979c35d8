"""Phases of a start, from logs and stamps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.bench.driver.client import Outcome
from pagebus.actors.bench.driver.deployment import Deployment
from pagebus.actors.bench.start import Phase, Start, born_s, figures, make_phases, medians, read_log
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names

LOG = """Pagebus 0.1.0
{"actor":"executor-host-0","phase":"weights","seconds":1.5,"event":"phase done","timestamp":"2026-01-01T00:00:04Z"}
{"actor":"executor-host-0","event":"ready","timestamp":"2026-01-01T00:00:06Z"}
{"actor":"serve","event":"ready","timestamp":"2026-01-01T00:00:06Z"}
{"no time": 1}
"""
START_S = 1767225600.0
"""2026-01-01T00:00:00Z."""


def deployment(log: Path) -> Deployment:
    """One that started at midnight and was ready after 7 s."""
    values: dict[str, Any] = {
        "bus": MemoryBus(MemoryServer(), Names()), "names": Names(), "executor": "e", "scheduler": "s",
        "detokenizers": (), "info": {}, "base_url": "", "bus_url": "", "log": log,
        "started_s": START_S, "redis_s": START_S + 0.5, "ready_s": START_S + 7,
    }  # fmt: skip
    return Deployment(**values)


def test_phases_come_from_logs_and_stamps(tmp_path: Path) -> None:
    """Each actor's phases, its way from process to ready, and the way to the first token; other lines are passed by."""
    (tmp_path / "log").write_text(LOG)
    answered = Outcome(0, sent_s=START_S + 7.5, first_s=START_S + 8)
    births = {"executor-host-0": START_S + 1}
    phases = make_phases(deployment(tmp_path / "log"), births, answered, read_log(tmp_path / "log"))
    assert phases == [
        Phase("redis-server", 0.0, 0.5),
        Phase("all ready, /health is 200", 0.0, 7.0),
        Phase("serve: until its actors are started", 0.5, 1.0),
        Phase("executor: from process to ready", 1.0, 6.0),
        Phase("executor: weights", 2.5, 4.0),
        Phase("first token over HTTP", 7.5, 8.0),
    ]


def test_medians_are_of_phases_that_every_run_has() -> None:
    """A phase that only one start had (compiling, say) is in the JSON only."""
    runs = [
        [Phase("a", 0.0, 1.0), Phase("compile", 1.0, 9.0)],
        [Phase("a", 0.0, 3.0)],
        [Phase("a", 0.0, 2.0)],
    ]
    assert medians(runs) == [Phase("a", 0.0, 2.0)]


def test_weights_have_a_rate() -> None:
    """Bytes of all weights over the time of their phase; the total has its spread."""
    rows = [Phase("executor: weights", 1.0, 3.0)]
    told = figures(rows, [Start(rows, total, 10_000_000_000) for total in (8.0, 9.0, 7.0)])
    assert told["weights_gb_per_s"] == {"median": 5.0}
    assert told["seconds"] == {"median": 8.0, "low": 7.0, "high": 9.0}


def test_a_process_was_born_before_now() -> None:
    """The birth of this process lies in the past, after its parent's."""
    assert born_s(os.getppid()) <= born_s(os.getpid()) + 0.02
    assert born_s(os.getpid()) == pytest.approx(time.time(), abs=3600)
