"""The metrics of one executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pagebus.actors.executor.metrics.cache_labels import cache_labels
from pagebus.actors.executor.metrics.experts import ExpertMetrics
from pagebus.actors.executor.metrics.kernels import KernelMetrics
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.metrics import STEP_BUCKETS_S, Counter, Metrics
from pagebus.bus.messages import StepResult

if TYPE_CHECKING:  # torch is imported while other things happen
    from pagebus.actors.executor.loading.loaded import EngineInfo
    from pagebus.actors.executor.step.completion import EngineStats
    from pagebus.actors.executor.step.step_kernels import StepKernels

MEMORY = (
    ("pagebus:gpu_memory_bytes", "Device memory in use, by whomever."),
    ("pagebus:gpu_memory_capacity_bytes", "Device memory there is."),
)
GRAPHS = ("pagebus:cuda_graphs", "CUDA graphs: captured by now, and all that are planned.")


class ExecutorMetrics:
    """Counts steps as they end, and shows what the engine says of itself."""

    def __init__(self, metrics: Metrics, engine: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._engine, self._clock = metrics, engine, clock
        self._kernels = KernelMetrics(metrics, engine)
        self._experts: ExpertMetrics | None = None
        self._graphs: tuple[int, int] | None = None
        self._ready_s = 0.0
        self._busy = self._counter("pagebus:executor_busy_seconds_total", "Seconds the device worked on steps.")
        self._wall = self._counter("pagebus:executor_wall_seconds_total", "Seconds since the executor is ready.")
        self._steps = self._counter("pagebus:executor_steps_total", "Steps computed.")
        self._tokens = self._counter("pagebus:executor_tokens_total", "Tokens computed, prompts included.")
        self._step_time = metrics.histogram(
            "pagebus:executor_step_seconds", "From a step's launch to its tokens.", STEP_BUCKETS_S, engine=engine
        )

    def _counter(self, name: str, text: str) -> Counter:
        return self._metrics.counter(name, text, engine=self._engine)

    def ready(self, settings: Settings, info: EngineInfo, expert_layers: Sequence[int]) -> None:
        """Steps can run from now on: count time and experts, and say what the cache is made of."""
        self._ready_s = self._clock()
        self._experts = ExpertMetrics(self._metrics, self._engine, expert_layers)
        labels = {"engine": self._engine, **cache_labels(settings, info)}
        self._metrics.gauge("vllm:cache_config_info", "What the cache is made of.", **labels).set(1)

    def step_done(self, result: StepResult, stats: EngineStats) -> None:
        """Count a finished step; ``stats`` are the engine's totals."""
        self._busy.rise_to(stats.busy_s)
        self._steps.rise_to(stats.steps)
        self._tokens.inc(result.num_computed_tokens)
        if len(result.sequence_ids):
            self._step_time.observe(result.done_s - result.launched_s)

    def update(self, kernels: Mapping[StepKernels, int], expert_tokens: npt.NDArray[np.int64] | None) -> None:
        """Show the time so far, the steps by their kernels, and the tokens by expert [L, E]. To be called as often as
        metrics are published: time passes without steps, too."""
        self._wall.rise_to(self._clock() - self._ready_s)
        self._kernels.update(kernels)
        if self._experts is not None and expert_tokens is not None:
            self._experts.update(expert_tokens)

    def show_graphs(self, progress: tuple[int, int] | None) -> bool:
        """Show how many graphs are captured, and planned; returns whether the last one has been since the last call."""
        if progress is None or progress == self._graphs:
            return False
        self._graphs = captured, planned = progress
        for state, count in (("captured", captured), ("planned", planned)):
            self._metrics.gauge(*GRAPHS, engine=self._engine, state=state).set(count)
        return captured >= planned

    def show_memory(self, memory: tuple[int, int]) -> None:
        """Show the bytes of the device's memory that are in use, and those that there are."""
        for (name, text), value in zip(MEMORY, memory, strict=True):
            self._metrics.gauge(name, text, engine=self._engine).set(value)
