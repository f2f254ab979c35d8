"""What an executor measures of its steps and of the time beside them."""

from __future__ import annotations

from pagebus.actors.executor.loading.loaded import EngineInfo
from pagebus.actors.executor.metrics.executor import ExecutorMetrics
from pagebus.actors.executor.step.completion import EngineStats
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.metrics import Metrics
from pagebus.bus.messages import StepResult

READY_S = 1000.0
RESULT = StepResult(
    step=1, scheduler_epoch=1, received_s=0.0, launched_s=0.0, done_s=1.5, num_computed_tokens=8
)  # fmt: skip
INFO = EngineInfo(20, 16, 4, 64, 2048, 307, "cpu", "float32")


class World:
    def __init__(self) -> None:
        self.now_s, self.metrics, self.stats = READY_S, Metrics(), EngineStats()
        self.measured = ExecutorMetrics(self.metrics, "executor-0", lambda: self.now_s)
        self.measured.ready(Settings(), INFO, ())

    def seconds(self, name: str) -> float:
        return self.metrics.counter(f"pagebus:executor_{name}_seconds_total", "", engine="executor-0").value


def test_time_passes_without_steps() -> None:
    """The share of busy time is that of any span of time, also of one in which the executor is idle."""
    world = World()
    world.now_s += 60
    world.measured.update({}, None)
    assert (world.seconds("busy"), world.seconds("wall")) == (0, 60)
    world.stats.completed(1.5)
    world.measured.step_done(RESULT, world.stats)
    world.now_s += 2
    world.measured.update({}, None)
    assert (world.seconds("busy"), world.seconds("wall")) == (1.5, 62)
