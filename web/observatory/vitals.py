"""A dozen figures of a deployment over a span of time, from what its actors' metrics were before and after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FIGURES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "output_tokens_per_s", "prompt_tokens_per_s",
           "requests_per_s", "running", "waiting", "kv_usage", "hit_rate", "host_usage", "device_busy")  # fmt: skip
"""In the order of :func:`figures`. Seconds, tokens and requests per second, counts, and shares from 0 to 1."""

TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
HISTOGRAMS = frozenset({TTFT, ITL})
SUMS = frozenset({
    "vllm:generation_tokens", "vllm:prompt_tokens", "vllm:request_success", "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "pagebus:executor_busy_seconds_total", "pagebus:executor_wall_seconds_total",
})  # fmt: skip
MEANS = frozenset({"vllm:kv_cache_usage_perc", "pagebus:host_cache_usage_perc"})


@dataclass(slots=True)
class Totals:
    """Metrics of all actors together: sums, means over replicas, and histograms as (bounds, counts)."""

    at_s: float
    values: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, tuple[list[float], list[int]]] = field(default_factory=dict)


def total(snapshots: Iterable[Mapping[str, Any] | None], at_s: float) -> Totals:
    """Add up what the figures are made of."""
    totals, parts = Totals(at_s), dict.fromkeys(MEANS, 0)
    for snapshot in snapshots:
        for name, _, data in snapshot["series"] if snapshot is not None else ():
            if name in HISTOGRAMS:
                bounds, counts = totals.histograms.get(name, (data["buckets"], [0] * len(data["counts"])))
                if bounds == data["buckets"]:
                    added = [one + other for one, other in zip(counts, data["counts"], strict=True)]
                    totals.histograms[name] = (bounds, added)
            elif name in SUMS or name in MEANS:
                totals.values[name] = totals.values.get(name, 0.0) + data["value"]
                if name in MEANS:
                    parts[name] += 1
    for name, count in parts.items():
        if count > 1:
            totals.values[name] /= count
    return totals


def figures(before: Totals, after: Totals) -> list[float | None]:
    """The figures of the time between two totals, in the order of ``FIGURES``; None where nothing happened."""
    span_s = max(after.at_s - before.at_s, 1e-3)

    def grown(name: str) -> float:
        """Of a counter. It falls when an actor has begun anew: then nothing is known."""
        return max(0.0, after.values.get(name, 0.0) - before.values.get(name, 0.0))

    def share(part: str, whole: str) -> float | None:
        return min(1.0, grown(part) / grown(whole)) if grown(whole) else None

    found = [
        *(quantile(before, after, TTFT, q) for q in (0.5, 0.99)),
        *(quantile(before, after, ITL, q) for q in (0.5, 0.99)),
        *(grown(name) / span_s for name in ("vllm:generation_tokens", "vllm:prompt_tokens", "vllm:request_success")),
        after.values.get("vllm:num_requests_running", 0.0),
        after.values.get("vllm:num_requests_waiting", 0.0),
        after.values.get("vllm:kv_cache_usage_perc", 0.0),
        share("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"),
        after.values.get("pagebus:host_cache_usage_perc", 0.0),
        share("pagebus:executor_busy_seconds_total", "pagebus:executor_wall_seconds_total"),
    ]
    return [None if value is None else float(f"{value:.5g}") for value in found]


def quantile(before: Totals, after: Totals, name: str, q: float) -> float | None:
    """Of what a histogram has counted meanwhile, as if values lay evenly inside each bucket."""
    bounds, counts = after.histograms.get(name, ([], []))
    old_bounds, old = before.histograms.get(name, (bounds, [0] * len(counts)))
    if old_bounds != bounds:
        return None
    new = [max(0, one - other) for one, other in zip(counts, old, strict=True)]
    left = q * sum(new)
    if not left:
        return None
    low = 0.0
    for bound, count in zip(bounds, new, strict=False):
        if count >= left:
            return low + (bound - low) * left / count
        left -= count
        low = bound
    return low
