"""Steps as spans on lanes: scheduler, bus, executor thread, device. As a Chrome trace, as a picture, as a summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pagebus.actors.bench.measures.watch import Step
from pagebus.actors.simulator.drawing.svg import COLORS, Chart
from pagebus.actors.telemetry.spans import CAPTURE, EAGER, LAUNCH

LANES = ("scheduler", "bus: plans", "bus: results", "executor thread", "device")
SCHEDULER, PLANS, RESULTS, THREAD, DEVICE = LANES
NAMES = ("land", "plan", "plan in flight", "result in flight", LAUNCH, "apply", "step", EAGER, CAPTURE)
ODD_STEPS = "#d4ae1d"
PROCESS_IDS = {"scheduler": 1, "bus: plans": 2, "bus: results": 2, "executor thread": 3, "device": 3}
PROCESS_NAMES = {1: "scheduler", 2: "bus", 3: "executor"}
ActorSpan = tuple[str, int, float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """``name`` of a step (0: of none) on a lane, from and to seconds of the wall clock."""

    lane: str
    name: str
    step: int
    began_s: float
    ended_s: float


def make_spans(steps: Sequence[Step], scheduler: Sequence[ActorSpan], executor: Sequence[ActorSpan]) -> list[Span]:
    """The spans of these steps, by time: what the actors noted of themselves, and what the stamps of plans and results
    say of the time between them."""
    began_s, ended_s = steps[0].planned_s, steps[-1].done_s
    # Of plans that are made at once, the first: it is sent when its span ends.
    number_at = {step.planned_s: step.number for step in reversed(steps)}
    spans = [
        Span(SCHEDULER, name, number_at.get(began, 0), began, ended)
        for name, _, began, ended in scheduler
        if began_s <= began <= ended_s and ended > began
    ]
    lane_of = dict.fromkeys(("apply", LAUNCH, EAGER, CAPTURE), THREAD) | {"device": DEVICE}
    spans += [
        Span(lane_of[name], "step" if name == "device" else name, step, began, ended)
        for name, step, began, ended in executor
        if began < ended_s and ended > began_s
    ]
    sent_s = {span.step: span.ended_s for span in spans if span.name == "plan"}
    landed_s = np.array([began for name, _, began, _ in scheduler if name == "land"])
    for step in steps:
        sent = sent_s.get(step.number, step.planned_s)
        spans.append(Span(PLANS, "plan in flight", step.number, sent, step.received_s))
        at = int(np.searchsorted(landed_s, step.done_s))
        if at < len(landed_s):
            spans.append(Span(RESULTS, "result in flight", step.number, step.done_s, float(landed_s[at])))
    return sorted(spans, key=lambda span: (span.began_s, -span.ended_s))


def chrome_trace(spans: Sequence[Span], steps: Sequence[Step]) -> dict[str, Any]:
    """The run in the trace event format of Perfetto and chrome://tracing. Messages in flight overlap, so they are
    asynchronous events; all others are complete events."""
    start_s = spans[0].began_s
    about = {
        step.number: {"step": step.number, "decodes": step.decodes, "prefill_tokens": step.prefill_tokens}
        for step in steps
    }
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in PROCESS_NAMES.items()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": PROCESS_IDS[lane], "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(LANES, 1)
    ]
    for span in spans:
        common = {
            "name": f"{span.name} {span.step}" if span.step else span.name,
            "cat": span.lane,
            "pid": PROCESS_IDS[span.lane],
            "tid": LANES.index(span.lane) + 1,
        }
        began, took = (span.began_s - start_s) * 1e6, max(span.ended_s - span.began_s, 0.0) * 1e6
        if span.lane in (PLANS, RESULTS):
            events.append({**common, "ph": "b", "id": span.step, "ts": began, "args": about.get(span.step, {})})
            events.append({**common, "ph": "e", "id": span.step, "ts": began + took})
        else:
            events.append({**common, "ph": "X", "ts": began, "dur": took, "args": about.get(span.step, {})})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def picture(spans: Sequence[Span], title: str, start_s: float, end_s: float) -> Chart:
    """What happened from ``start_s`` to ``end_s``, the lanes above each other. Steps alternate in shade, messages in
    height."""
    chart = Chart(title, "milliseconds", "", (0, (end_s - start_s) * 1e3), (0, len(LANES)), y_names=LANES[::-1])
    colors = dict(zip(NAMES, COLORS, strict=False))
    for span in (span for span in spans if span.began_s < end_s and span.ended_s > start_s):
        odd, low, height = span.step % 2, len(LANES) - 0.9 - LANES.index(span.lane), 0.8
        if span.lane in (PLANS, RESULTS):
            low, height = low + 0.4 * odd, 0.4
        color = ODD_STEPS if span.lane == DEVICE and odd else colors[span.name]
        chart.box((span.began_s - start_s) * 1e3, (span.ended_s - start_s) * 1e3, low, low + height, color)
    for name, color in colors.items():
        chart.name(color, name)
    return chart


def busy_and_gaps(spans: Iterable[Span]) -> tuple[float, list[tuple[float, int]]]:
    """Share of the time from the first to the last step in which the device worked, and each time it did not: seconds
    and the step that came after, the longest first."""
    device = sorted((span for span in spans if span.lane == DEVICE), key=lambda span: span.began_s)
    gaps, idle_s, end_s = [], 0.0, device[0].ended_s
    for _, span in pairwise(device):
        gap_s = max(span.began_s - end_s, 0.0)
        idle_s += gap_s
        gaps.append((gap_s, span.step))
        end_s = max(end_s, span.ended_s)
    return 1 - idle_s / (end_s - device[0].began_s), sorted(gaps, reverse=True)


def summary(spans: Sequence[Span]) -> str:
    """Median and longest time of each kind of span, how busy the device was, and its longest pauses."""
    lines = [f"{'span':20}{'median ms':>12}{'longest ms':>12}"]
    for name in NAMES:
        times = [(span.ended_s - span.began_s) * 1e3 for span in spans if span.name == name]
        if times:
            lines.append(f"{name:20}{np.median(times):12.3f}{max(times):12.3f}")
    busy, gaps = busy_and_gaps(spans)
    longest = ", ".join(f"{gap_s * 1e3:.3f} before step {step}" for gap_s, step in gaps[:3])
    return "\n".join([*lines, f"device busy {busy:.1%}; longest pauses, ms: {longest}"])
