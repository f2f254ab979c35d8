"""The device's use of time in a run: steps by kind, and the causes of its idle time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pagebus.actors.bench.measures.timeline import DEVICE, Span
from pagebus.actors.bench.measures.watch import Step
from pagebus.actors.telemetry.spans import CAPTURE, EAGER, LAUNCH

LONGEST = 5
WAITS = ("a plan to be made", "the bus", "the executor's thread", "its launch")


@dataclass(frozen=True, slots=True)
class Pause:
    """A time without a step on the device: when it began (wall clock), and the seconds spent on each of ``WAITS``."""

    began_s: float
    waited_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.waited_s)


def pauses(steps: Sequence[Step], spans: Iterable[Span]) -> list[Pause]:
    """Those between the first step and the last, by what the next step waited for meanwhile: it is planned, then
    received, then taken from the queue, then launched."""
    about = {step.number: step for step in steps}
    spans = list(spans)
    device = sorted((span for span in spans if span.lane == DEVICE and span.step in about), key=lambda s: s.began_s)
    launch_began_s = {span.step: span.began_s for span in spans if span.name in (LAUNCH, EAGER)}
    found = []
    for before, span in pairwise(device):
        step, at = about[span.step], before.ended_s
        waited_s = []
        for until in (step.planned_s, step.received_s, launch_began_s.get(span.step, step.launched_s), span.began_s):
            until = min(until, span.began_s)
            waited_s.append(max(until - at, 0.0))
            at = max(at, until)
        found.append(Pause(before.ended_s, tuple(waited_s)))
    return found


def report(steps: Sequence[Step], spans: Sequence[Span]) -> str:
    """The run in some lines: its kinds of steps, what was captured meanwhile, and the idle times."""
    took_s = {span.step: span.ended_s - span.began_s for span in spans if span.lane == DEVICE}
    from_graph = {span.step for span in spans if span.name == LAUNCH}
    kinds: dict[str, list[Step]] = {}
    for step in steps:
        kind = "with prompts" if step.prefill_tokens else "decodes"
        kind += ", graph" if step.number in from_graph else ", no graph"
        kinds.setdefault(kind, []).append(step)
    lines = [f"{'steps':24}{'number':>8}{'device s':>10}{'mean ms':>9}{'tokens':>8}{'rows':>7}"]
    for kind, those in sorted(kinds.items()):
        device_s = sum(took_s.get(step.number, 0.0) for step in those)
        tokens, rows = (
            sum(values) / len(those) for values in ([s.num_tokens for s in those], [s.num_sampled for s in those])
        )
        lines.append(
            f"{kind:24}{len(those):8}{device_s:10.3f}{device_s / len(those) * 1e3:9.3f}{tokens:8.1f}{rows:7.1f}"
        )
    wall_s = steps[-1].done_s - steps[0].launched_s
    captures = [span.ended_s - span.began_s for span in spans if span.name == CAPTURE]
    if captures:
        lines.append(f"{len(captures)} graphs captured meanwhile, in {sum(captures):.3f} s")
    idle = pauses(steps, spans)
    total = [sum(times) * 1e3 for times in zip(*(pause.waited_s for pause in idle), strict=True)]
    parts = ", ".join(f"{wait} {waited_ms:.1f}" for wait, waited_ms in zip(WAITS, total, strict=True))
    lines.append(f"device idle {sum(total) / 1e3 / wall_s:.2%} of {wall_s:.3f} s; it waited, ms, for {parts}")
    longest = sorted(idle, key=lambda pause: pause.seconds, reverse=True)[:LONGEST]
    shown = [
        f"{pause.seconds * 1e3:.1f} after {pause.began_s - steps[0].launched_s:.2f} s ({WAITS[_most(pause.waited_s)]})"
        for pause in longest
    ]
    lines.append(f"longest pauses, ms: {', '.join(shown)}")
    return "\n".join(lines)


def _most(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
