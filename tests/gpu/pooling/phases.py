"""Where the time of steps that pool went, from the spans that scheduler and executor have noted
(:mod:`pagebus.actors.telemetry.spans`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from pagebus.actors.telemetry.spans import CAPTURE, EAGER, LAUNCH, read_spans

Span = tuple[str, int, float, float]
"""Name, step, and when it began and ended."""
PARTS = ("to the plan", "to the launch", "launch", "to the end on the device", "to the answer", "(on the device)")
"""Of a request of one input: what lies between two moments, and at last how long the device took for its step."""
Sent = tuple[int, float, float]
"""Tokens of a request of one input, and when it was sent and answered, in seconds of the wall clock."""


def read_all(folder: Path) -> tuple[list[Span], list[Span]]:
    """The executor's spans, and those of the other actors."""
    executor, others = [], []
    for path in folder.glob("*.jsonl"):
        spans = read_spans(path)
        (executor if any(name == "device" for name, *_ in spans) else others).extend(spans)
    return executor, others


def longest_step(spans: Sequence[Span]) -> dict[str, tuple[float, float]]:
    """When each of an executor's spans of that step began and ended; others of a request only free slots."""
    launched = {span[0] for span in spans} & {LAUNCH, EAGER} or {"device"}  # CPUs note no launches
    took = {step: ended - began for name, step, began, ended in spans if name in launched}
    chosen = max(took, key=lambda step: took[step], default=None)
    return {name: (began, ended) for name, step, began, ended in spans if step == chosen}


def alone_phases(sent: Sequence[Sent], folder: Path) -> Iterator[str]:
    """Medians of the parts of requests that were sent one after another, a line for each number of tokens, from the
    spans of all actors in ``folder``."""
    executor, scheduler = read_all(folder)
    planned = sorted(began for name, _, began, _ in scheduler if name == "plan")
    for tokens in dict.fromkeys(tokens for tokens, _, _ in sent):
        rows, eager = [], 0
        for _, began_s, ended_s in (each for each in sent if each[0] == tokens):
            own = longest_step([span for span in executor if began_s < span[2] < ended_s])
            launch = own.get(LAUNCH) or own.get(EAGER) or own.get("device")
            plans = [first for first in planned if launch is not None and began_s < first < launch[0]]
            if launch is None or "device" not in own or not plans:
                continue
            eager += EAGER in own
            edges = (began_s, plans[-1], launch[0], launch[1], own["device"][1], ended_s)
            rows.append([*(last - first for first, last in pairwise(edges)), own["device"][1] - own["device"][0]])
        if not rows:
            continue
        parts = np.median(np.array(rows), 0) * 1e3
        told = ", ".join(f"{name} {part:.2f} ms" for name, part in zip(PARTS, parts, strict=True))
        yield f"inputs of {tokens}, {len(rows)} alone, {eager} of them without a graph: {told}"


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many requests at a time, of inputs of so many tokens, from and to seconds of the wall clock; by how much counters
    of ``/metrics`` grew meanwhile, by name."""

    tokens: int
    began_s: float
    ended_s: float
    grown: Mapping[str, float]


WAITS = ("for its plan or the executor's thread", "for its launch", "behind its launch")
WORK = ("land", "plan", "apply", LAUNCH, EAGER, CAPTURE)
"""What scheduler and executor do one after another in a thread each."""
SMALL = 0.25
"""Steps that take less than this share of the longest only free slots, or are the last."""


def crowd_phases(crowds: Sequence[Crowd], folder: Path) -> Iterator[str]:
    """For each crowd: how often its large steps came, what they waited for while the device was idle, in shares of the
    time, and how busy threads and processes were."""
    executor, others = read_all(folder)
    for crowd in crowds:
        inside = [span for span in (*executor, *others) if crowd.began_s < span[2] < crowd.ended_s]
        device = sorted((span for span in inside if span[0] == "device"), key=lambda span: span[2])
        if len(device) < 2:
            continue
        whole_s, longest_s = device[-1][3] - device[0][2], max(ended - began for *_, began, ended in device)
        took = [ended - began for *_, began, ended in device if ended - began >= SMALL * longest_s]
        waited = idle_s(
            device, {step: (began, ended) for name, step, began, ended in inside if name in (LAUNCH, EAGER)}
        )
        eager = sum(name == EAGER for name, *_ in inside)
        shares = {each: sum(ended - began for name, _, began, ended in inside if name == each) for each in WORK}
        rates = (f"{name} {value / (crowd.ended_s - crowd.began_s):.2f}" for name, value in crowd.grown.items())
        yield (
            f"a crowd, inputs of {crowd.tokens}: {len(took)} large steps, every {whole_s / len(took) * 1e3:.1f} ms, "
            f"each {np.median(took) * 1e3:.1f} ms on the device, {eager} launched without a graph; idle "
            f"{sum(waited) / whole_s:.0%} of the time, waiting "
            f"{', '.join(f'{name} {wait / whole_s:.0%}' for name, wait in zip(WAITS, waited, strict=True))}; at work "
            f"{', '.join(f'{name} {share / whole_s:.0%}' for name, share in shares.items() if share)}; "
            f"in a second {', '.join(rates)}"
        )


def idle_s(device: Sequence[Span], launches: Mapping[int, tuple[float, float]]) -> list[float]:
    """Seconds in which the device was idle before its steps, by :data:`WAITS`: until a step's launch began, until that
    ended, and until the step began on the device."""
    waited = np.zeros(len(WAITS))
    for (*_, free_s), (_, step, began_s, _) in pairwise(device):
        edges = [free_s, *launches.get(step, (began_s, began_s)), max(free_s, began_s)]
        waited += np.diff(np.clip(edges, free_s, max(free_s, began_s)))
    return waited.tolist()
