"""What the device did in a whole run: steps by kind, and what it waited for whenever it had nothing to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from actors.bench.timeline import DEVICE, Span
from actors.bench.watch import Step
from actors.spans import CAPTURE, EAGER, LAUNCH

WAITS = ("a plan to be made", "the bus", "the executor's thread", "its launch")


def idle_times(steps: Sequence[Step], spans: Iterable[Span]) -> dict[str, float]:
    """Seconds without a step on the device between the first and the last, by what the next step waited for meanwhile:
    it is planned, then received, then taken from the queue, then launched."""
    about = {step.number: step for step in steps}
    spans = list(spans)
    device = sorted((span for span in spans if span.lane == DEVICE and span.step in about), key=lambda s: s.began_s)
    launch_began_s = {span.step: span.began_s for span in spans if span.name in (LAUNCH, EAGER)}
    idle = dict.fromkeys(WAITS, 0.0)
    for before, span in pairwise(device):
        step = about[span.step]
        stages = (step.planned_s, step.received_s, launch_began_s.get(span.step, step.launched_s), span.began_s)
        at = before.ended_s
        for wait, until in zip(WAITS, stages, strict=True):
            until = min(until, span.began_s)
            idle[wait] += max(until - at, 0.0)
            at = max(at, until)
    return idle


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
    idle = idle_times(steps, spans)
    parts = ", ".join(f"{wait} {seconds * 1e3:.1f}" for wait, seconds in idle.items())
    lines.append(f"device idle {sum(idle.values()) / wall_s:.2%} of {wall_s:.3f} s; it waited, ms, for {parts}")
    return "\n".join(lines)
