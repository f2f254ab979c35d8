"""Pictures of a simulated run: blocks and batch of its first executor over time, and latencies of all requests."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np

from actors.scheduler.replica import Replica
from actors.simulator.deployment import Deployment
from actors.simulator.histogram import Histogram
from actors.simulator.simulation import Observer
from actors.simulator.svg import COLORS, FAINT, Chart
from bus.messages import Int32Array, RequestFailed, SequenceEnded, SequenceStarted, StepPlan, StepResult

MAX_SAMPLES = 1200
MAX_MAP_BLOCKS = 512
MAX_BARS = 400
CACHED = -1
"""In a block map: nobody's, but its content can still be found."""


class Recorder(Observer):
    """Hears everything beside the clients and keeps what the pictures need, in bounded memory."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.replica = next(iter(deployment.simulation.members))
        self.times: list[float] = []
        self.held: list[int] = []
        self.listed: list[int] = []
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.maps: list[Int32Array] = []
        self.steps: list[tuple[int, int]] = []
        """Decode and prefill tokens of each step, of the first MAX_SAMPLES * 10 steps."""
        self.num_blocks = 0
        self._every = self._skipped = 1
        self._clients = deployment.clients
        deployment.simulation.observer = self

    def started(self, at_s: float, started: SequenceStarted) -> None:
        self._clients.started(at_s, started)

    def ended(self, at_s: float, ended: SequenceEnded) -> None:
        self._clients.ended(at_s, ended)

    def failed(self, at_s: float, failed: RequestFailed) -> None:
        self._clients.failed(at_s, failed)

    def planned(self, at_s: float, replica: str, plan: StepPlan) -> None:
        if replica != self.replica or len(self.steps) >= 10 * MAX_SAMPLES or not len(plan.slots):
            return
        prefill = int(plan.num_scheduled[plan.num_decodes :].sum())
        self.steps.append((plan.num_decodes, prefill))

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        self._clients.result(at_s, replica, result)
        core = self.deployment.simulation.core
        if replica != self.replica or replica not in core.replicas:
            return
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._sample(at_s, core.replicas[replica])
        if len(self.times) >= MAX_SAMPLES:
            for column in (self.times, self.held, self.listed, self.running, self.waiting, self.maps):
                del column[::2]
            self._every *= 2

    def _sample(self, at_s: float, replica: Replica) -> None:
        pool = replica.pool
        self.num_blocks = pool.num_blocks
        self.times.append(at_s)
        self.held.append(pool.num_blocks - pool.num_free)
        self.listed.append(len(replica.index))
        self.running.append(len(replica.running))
        self.waiting.append(len(self.deployment.simulation.core.waiting))
        if pool.num_blocks <= MAX_MAP_BLOCKS:
            owners = np.zeros(pool.num_blocks, np.int32)
            owners[[block for block in range(pool.num_blocks) if block in replica.index]] = CACHED
            for sequence in reversed(replica.running.occupied()):
                owners[sequence.blocks] = sequence.order
            self.maps.append(owners)


def draw(recorder: Recorder, folder: Path) -> list[Path]:
    """Write all pictures; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    charts = {"batch": _batch(recorder), "latency": _latency(recorder)}
    if recorder.times:
        charts |= {"blocks": _blocks(recorder), "sequences": _sequences(recorder)}
    if recorder.maps:
        charts["block-map"] = _block_map(recorder)
    paths = []
    for name, chart in charts.items():
        path = folder / f"{name}.svg"
        path.write_text(str(chart), encoding="utf-8")
        paths.append(path)
    return paths


def _blocks(recorder: Recorder) -> Chart:
    times, blocks = recorder.times, recorder.num_blocks
    chart = Chart(f"Blocks of {recorder.replica}", "seconds", "blocks", (times[0], times[-1]), (0, blocks))
    chart.area(list(zip(times, recorder.held, strict=True)), COLORS[0], "held by running sequences")
    chart.line(list(zip(times, recorder.listed, strict=True)), COLORS[1], "found by the prefix cache (held or free)")
    return chart


def _sequences(recorder: Recorder) -> Chart:
    times = recorder.times
    most = max(*recorder.running, *recorder.waiting, 1) if len(times) > 1 else 1
    chart = Chart("Sequences", "seconds", "sequences", (times[0], times[-1]), (0, most))
    chart.line(list(zip(times, recorder.running, strict=True)), COLORS[0], f"running on {recorder.replica}")
    chart.line(list(zip(times, recorder.waiting, strict=True)), COLORS[4], "waiting, for any executor")
    return chart


def _batch(recorder: Recorder) -> Chart:
    steps = np.array(recorder.steps or [(0, 0)], float)
    width = -(-len(steps) // MAX_BARS)
    bars = [steps[start : start + width].mean(0) for start in range(0, len(steps), width)]
    most = max(float(bar.sum()) for bar in bars)
    each = "tokens" if width == 1 else f"tokens, mean of {width} steps"
    chart = Chart(f"Batch of each step of {recorder.replica}", "step", each, (0, len(bars) * width), (0, most))
    for number, (decodes, prefill) in enumerate(bars):
        left, right = number * width, (number + 1) * width
        chart.box(left, right, 0, decodes, COLORS[0])
        if prefill:
            chart.box(left, right, decodes, decodes + prefill, COLORS[1])
    chart.name(COLORS[0], "decode")
    chart.name(COLORS[1], "prefill")
    return chart


def _latency(recorder: Recorder) -> Chart:
    clients = recorder.deployment.clients
    named: list[tuple[str, Histogram]] = [
        ("time to first token", clients.ttft),
        ("between tokens", clients.itl),
        ("per token, mean of a request", clients.tpot),
    ]
    curves = [(name, [(value * 1e3, share) for value, share in values.curve()]) for name, values in named]
    values = [value for _, curve in curves for value, _ in curve] or [1.0]
    chart = Chart(
        "Latencies", "milliseconds", "share of all up to here", (min(values), max(values) * 1.05), (0, 1), log_x=True
    )
    for color, (name, curve) in zip(COLORS, curves, strict=False):
        chart.line(curve, color, name)
    return chart


def _block_map(recorder: Recorder) -> Chart:
    """Which block belongs to whom: a row per block, a colour per sequence."""
    times, blocks = [*recorder.times, recorder.times[-1]], recorder.num_blocks
    owners = np.stack(recorder.maps)
    height = max(300, min(2 * blocks, 700) + 110)
    chart = Chart(
        f"Block map of {recorder.replica}", "seconds", "block", (times[0], times[-1]), (0, blocks), height=height
    )
    for block in range(blocks):
        column = owners[:, block]
        edges = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(column)]
        for start, end in pairwise(edges):
            owner = int(column[start])
            if owner:
                color = FAINT if owner == CACHED else COLORS[owner % len(COLORS)]
                chart.box(times[start], times[end], block, block + 1, color)
    chart.name(COLORS[0], "a colour per sequence")
    chart.name(FAINT, "free, content still found by the prefix cache")
    return chart
