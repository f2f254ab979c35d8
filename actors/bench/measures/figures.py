"""Figures of a run, and medians with their spread over several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagebus.actors.bench.measures.costs import Costs
from pagebus.actors.bench.measures.watch import Floats, Run, Step

Figures = dict[str, float]


def make_figures(run: Run, costs: Costs, *, batch: int = 0) -> Figures:
    """All figures of one run; times in the unit of the name.

    ``batch`` above 0: only steps that decode exactly that many sequences count for step time, bytes and operations;
    0: all. What cannot be said of so few steps or tokens is missing.
    """
    end_s = run.steps[-1].done_s
    seconds = end_s - run.submitted_s
    gaps = token_gaps(run)
    first = (run.token_s[run.token_indexes == 0] - run.submitted_s) * 1e3
    steps, step_s = counted_steps(run.steps, batch)
    busy_s = sum(step.busy_s for step in run.steps)
    figures = {
        "seconds": seconds,
        "output_tokens_per_s": len(run.token_s) / seconds,
        "prompt_tokens_per_s": run.prompt_tokens / seconds,
        "cached_tokens": float(run.cached_tokens),
        "steps": float(len(run.steps)),
        **_spread("ttft_ms", first),
        **_spread("itl_ms", gaps * 1e3),
        **_spread("step_ms", step_s * 1e3),
        "gpu_busy_share": busy_s / seconds,
        **bus_times(run.steps),
    }
    if run.scheduler_s is not None:
        figures["scheduler_ms"] = run.scheduler_s / len(run.steps) * 1e3
    if len(steps):
        total_s = float(step_s.sum())
        figures["tb_per_s"] = sum(map(costs.bytes_of, steps)) / total_s / 1e12
        figures["tflop_per_s"] = sum(map(costs.flops_of, steps)) / total_s / 1e12
    return figures


def token_gaps(run: Run) -> Floats:
    """Seconds between each token and the next one of its request [m]."""
    order = np.lexsort((run.token_indexes, run.requests))
    requests, times = run.requests[order], run.token_s[order]
    same = requests[1:] == requests[:-1]
    gaps: Floats = np.diff(times)[same]
    return gaps


def counted_steps(steps: Sequence[Step], batch: int) -> tuple[list[Step], Floats]:
    """Steps with the seconds they took: from the result before, which was of the step before, to their own.

    The first step of a run took from when it was launched.
    """
    counted, seconds = [], []
    for before, step in zip([None, *steps], steps, strict=False):
        if batch and not (step.decodes == step.num_sampled == batch and step.prefill_tokens == 0):
            continue
        if batch and (before is None or before.num_sampled < batch):
            continue
        counted.append(step)
        seconds.append(step.done_s - (step.launched_s if before is None else before.done_s))
    return counted, np.array(seconds)


def bus_times(steps: Sequence[Step]) -> Figures:
    """Medians of both ways over the bus, ms: ``plan_ms`` from the beginning of planning to the executor's receipt,
    ``result_ms`` from the tokens on the host to the beginning of the next planning."""
    planned = np.array([step.planned_s for step in steps])
    done = np.array([step.done_s for step in steps])
    plans = np.array([step.received_s for step in steps]) - planned
    after = np.searchsorted(planned, done)
    results = planned[after[after < len(planned)]] - done[after < len(planned)]
    figures = {"plan_ms": float(np.median(plans)) * 1e3}
    if len(results):
        figures["result_ms"] = float(np.median(results)) * 1e3
    return figures


def _spread(name: str, values: Floats) -> Figures:
    if not len(values):
        return {}
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_p50": float(np.quantile(values, 0.5)),
        f"{name}_p99": float(np.quantile(values, 0.99)),
    }


def summary(runs: Sequence[Figures]) -> dict[str, dict[str, Any]]:
    """Median, smallest and largest value of every figure, of the runs that have it."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run.items():
            values.setdefault(name, []).append(value)
    return {
        name: {"median": float(np.median(each)), "low": min(each), "high": max(each)} for name, each in values.items()
    }
