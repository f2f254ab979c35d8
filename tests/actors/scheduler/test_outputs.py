"""Lines about sequences that lose their slots: one a while for each reason, however many there are."""

from __future__ import annotations

from typing import Any

from structlog.testing import CapturingLogger

from pagebus.actors.scheduler.events import MOVED, BlocksPulled, Preempted
from pagebus.actors.scheduler.outputs import SHOWN_IDS, OutputRouter
from pagebus.bus.streams import Names


def make_router(log: Any) -> OutputRouter:
    unused: Any = None
    return OutputRouter(
        Names("test"), unused, core=unused, detokenizers=unused, checkpoints=unused, work=unused,
        dead_letters=unused, metrics=unused, log=log, logs_requests=False,
    )  # fmt: skip


def test_sequences_of_a_replica_that_drains_are_one_line() -> None:
    """It has the replicas that they left and some of the requests, those with most sequences first."""
    log = CapturingLogger()
    router = make_router(log)
    for number in range(20):
        router.route(Preempted(f"r{number}", number, f"gpu-{number % 2}", swapped=False, why=MOVED))
    router.route(Preempted("r9", 20, "gpu-1", swapped=False, why=MOVED))
    router.route(BlocksPulled("gpu-2", [1, 2]))
    router.route(Preempted("other", 21, "gpu-2", swapped=True))
    router.log_preempted()
    lines = {call.args[0]: call.kwargs for call in log.calls}
    assert lines["moved"]["request_ids"][0] == "r9"
    assert len(lines["moved"]["request_ids"]) == SHOWN_IDS
    assert (lines["moved"]["count"], lines["moved"]["replicas"]) == (21, ["gpu-0", "gpu-1"])
    assert lines["preempted"] == {"count": 1, "replicas": ["gpu-2"], "request_ids": ["other"]}
    router.log_preempted()
    assert len(log.calls) == 2, "each is logged once"
