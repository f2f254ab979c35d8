"""Pictures of a run, simulated or recorded: blocks and batch of one executor over time, latencies of all requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from pagebus.actors.simulator.drawing.svg import COLORS, FAINT, Chart, Point
from pagebus.bus.messages import Int32Array

MAX_SAMPLES = 1200
MAX_MAP_BLOCKS = 512
MAX_BARS = 400
CACHED = -1
"""In a block map: without owner, but its content can still be found."""


@dataclass(slots=True)
class Run:
    """What the pictures need of one executor. A sample is taken at each of ``times`` (seconds); ``waiting`` may be
    empty, and so may ``maps``: the owner of each block [num_blocks], a number above 0, 0 or CACHED."""

    name: str
    num_blocks: int = 0
    times: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    listed: list[int] = field(default_factory=list)
    """Blocks with content that can be found, held or not."""
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    maps: list[Int32Array] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Decode and prefill tokens of each step; drafts are of decodes."""
    latencies: dict[str, list[Point]] = field(default_factory=dict)
    """(milliseconds, share of values up to it) by name."""

    def has_blocks(self, num_blocks: int) -> None:
        """The executor has this many blocks."""
        self.num_blocks = num_blocks

    def show_latencies(self, curves: dict[str, list[Point]]) -> None:
        """Draw these curves."""
        self.latencies = curves

    def halve(self) -> None:
        """Forget every other sample."""
        for column in (self.times, self.held, self.listed, self.running, self.waiting, self.maps):
            del column[::2]


def draw(run: Run, folder: Path) -> list[Path]:
    """Write all pictures there is something for; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    charts = {"batch": _batch(run)}
    if run.latencies:
        charts["latency"] = _latency(run)
    if run.times:
        charts |= {"blocks": _blocks(run), "sequences": _sequences(run)}
    if run.maps:
        charts["block-map"] = _block_map(run)
    paths = []
    for name, chart in charts.items():
        path = folder / f"{name}.svg"
        path.write_text(str(chart), encoding="utf-8")
        paths.append(path)
    return paths


def _blocks(run: Run) -> Chart:
    times, blocks = run.times, run.num_blocks
    chart = Chart(f"Blocks of {run.name}", "seconds", "blocks", (times[0], times[-1]), (0, blocks))
    chart.area(list(zip(times, run.held, strict=True)), COLORS[0], "held by running sequences")
    chart.line(list(zip(times, run.listed, strict=True)), COLORS[1], "found by the prefix cache (held or free)")
    return chart


def _sequences(run: Run) -> Chart:
    times = run.times
    most = max([*run.running, *run.waiting, 1])
    chart = Chart("Sequences", "seconds", "sequences", (times[0], times[-1]), (0, most))
    chart.line(list(zip(times, run.running, strict=True)), COLORS[0], f"running on {run.name}")
    if run.waiting:
        chart.line(list(zip(times, run.waiting, strict=True)), COLORS[4], "waiting, for any executor")
    return chart


def _batch(run: Run) -> Chart:
    steps = np.array(run.steps or [(0, 0)], float)
    width = -(-len(steps) // MAX_BARS)
    bars = [steps[start : start + width].mean(0) for start in range(0, len(steps), width)]
    most = max(float(bar.sum()) for bar in bars)
    each = "tokens" if width == 1 else f"tokens, mean of {width} steps"
    chart = Chart(f"Batch of each step of {run.name}", "step", each, (0, len(bars) * width), (0, most))
    for number, (decodes, prefill) in enumerate(bars):
        left, right = number * width, (number + 1) * width
        chart.box(left, right, 0, decodes, COLORS[0])
        if prefill:
            chart.box(left, right, decodes, decodes + prefill, COLORS[1])
    chart.name(COLORS[0], "decode")
    chart.name(COLORS[1], "prefill")
    return chart


def _latency(run: Run) -> Chart:
    curves = list(run.latencies.items())
    values = [value for _, curve in curves for value, _ in curve] or [1.0]
    chart = Chart(
        "Latencies", "milliseconds", "share of all up to here", (min(values), max(values) * 1.05), (0, 1), log_x=True
    )
    for color, (name, curve) in zip(COLORS, curves, strict=False):
        chart.line(curve, color, name)
    return chart


def _block_map(run: Run) -> Chart:
    """Which block belongs to whom: a row per block, a colour per sequence."""
    times, blocks = [*run.times, run.times[-1]], run.num_blocks
    owners = np.stack(run.maps)
    height = max(300, min(2 * blocks, 700) + 110)
    chart = Chart(f"Block map of {run.name}", "seconds", "block", (times[0], times[-1]), (0, blocks), height=height)
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
