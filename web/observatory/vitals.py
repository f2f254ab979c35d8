"""Figures of a deployment over a span of time, computed from its metrics at the start and the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
E2E, QUEUE = "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds"
ERRORS, FINISHED = "pagebus:errors", "vllm:request_success"
RESUMED = "pagebus:resumed_sequences_total"

QUANTILES = {"ttft": TTFT, "itl": ITL, "e2e": E2E, "queue": QUEUE}
"""Each is shown as ``*_p50_s`` and ``*_p99_s``."""
RATES = {
    "output_tokens_per_s": "vllm:generation_tokens",
    "prompt_tokens_per_s": "vllm:prompt_tokens",
    "requests_per_s": "finished",
    "cancelled_per_s": "cancelled",
    "refused_per_s": "429",
    "timeouts_per_s": "408",
    "client_errors_per_s": "4xx",
    "server_errors_per_s": "5xx",
    "swaps_per_s": "pagebus:swap_preemptions",
    "recomputes_per_s": "pagebus:recompute_preemptions",
    "parked_per_s": "pagebus:parked_sequences",
}
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "host_usage": "pagebus:host_cache_usage_perc",
}
SHARES = {
    "hit_rate": ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries"),
    "device_busy": ("pagebus:executor_busy_seconds_total", "pagebus:executor_wall_seconds_total"),
}
RARE = frozenset({"vllm:prefix_cache_queries"})
"""Counters that grow only per request; shares of them are taken over the same time as quantiles."""
FIGURES = (*(f"{name}_{q}_s" for name in QUANTILES for q in ("p50", "p99")), *RATES, *GAUGES, *SHARES)
"""In the order of :func:`figures`. Seconds, events per second, counts, and shares from 0 to 1."""

HISTOGRAMS = frozenset(QUANTILES.values())
MEANS = frozenset({"vllm:kv_cache_usage_perc", "pagebus:host_cache_usage_perc"})
SUMS = (frozenset({*RATES.values(), *GAUGES.values(), RESUMED}) - MEANS) | {
    name for pair in SHARES.values() for name in pair
}
CANCELLED = frozenset({"abort"})
LEFT = 499
"""Stands for a client that left before it had its answer: no error of anybody's, but a cancelled request."""
QUANTILES_OVER_S = 30.0
"""The 99th percentile of two seconds is that of a handful of requests."""


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
        for name, labels, data in snapshot["series"] if snapshot is not None else ():
            if name in HISTOGRAMS:
                _add_histogram(totals, name, data.get("fine", data))
                continue
            for counted in counted_as(name, labels):
                totals.values[counted] = totals.values.get(counted, 0.0) + data["value"]
            parts[name] = parts.get(name, 0) + (name in MEANS)
    for name in MEANS:
        if parts[name] > 1:
            totals.values[name] /= parts[name]
    return totals


def counted_as(name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
    """The sums that a series belongs to."""
    if name == FINISHED:
        return ("cancelled",) if labels.get("finished_reason") in CANCELLED else ("finished",)
    if name == ERRORS:
        status = labels.get("status", "")
        return () if status == str(LEFT) else (status, f"{status[:1]}xx")
    return (name,) if name in SUMS or name in MEANS else ()


def _add_histogram(totals: Totals, name: str, data: Mapping[str, Any]) -> None:
    bounds, counts = totals.histograms.get(name, (data["buckets"], [0] * len(data["counts"])))
    if bounds == data["buckets"]:
        added = [one + other for one, other in zip(counts, data["counts"], strict=True)]
        totals.histograms[name] = (bounds, added)


class Spans:
    """Makes figures of totals that come one after another: rates since the last one, quantiles over
    ``QUANTILES_OVER_S`` at least (so far as that is known)."""

    def __init__(self) -> None:
        self._before: deque[Totals] = deque()

    def copy(self) -> Spans:
        """The same past, which goes on apart."""
        other = Spans()
        other._before.extend(self._before)
        return other

    @property
    def last(self) -> Totals | None:
        return self._before[-1] if self._before else None

    def next(self, after: Totals) -> list[float | None] | None:
        """The figures up to ``after``; None of the first one, also of the first since the clock was set back."""
        if self._before and after.at_s < self._before[-1].at_s:
            self._before.clear()
        before = self.last
        self._before.append(after)
        while len(self._before) > 2 and after.at_s - self._before[1].at_s >= QUANTILES_OVER_S:
            self._before.popleft()
        return None if before is None else figures(before, after, self._before[0])


def figures(before: Totals, after: Totals, long_before: Totals | None = None) -> list[float | None]:
    """The figures of the time between two totals, in the order of ``FIGURES``; None where nothing happened. Quantiles
    and the share of hits are of the time since ``long_before``."""
    span_s = max(after.at_s - before.at_s, 1e-3)

    def grown(name: str, since: Totals = before) -> float:
        """The rate of a counter; None if it fell, because an actor has restarted."""
        return max(0.0, after.values.get(name, 0.0) - since.values.get(name, 0.0))

    def share(part: str, whole: str) -> float | None:
        since = (long_before or before) if whole in RARE else before
        return min(1.0, grown(part, since) / grown(whole, since)) if grown(whole, since) else None

    found = [
        *(quantile(long_before or before, after, name, q) for name in QUANTILES.values() for q in (0.5, 0.99)),
        *(grown(name) / span_s for name in RATES.values()),
        *(after.values.get(name, 0.0) for name in GAUGES.values()),
        *(share(part, whole) for part, whole in SHARES.values()),
    ]
    return [None if value is None else float(f"{value:.5g}") for value in found]


def quantile(before: Totals, after: Totals, name: str, q: float) -> float | None:
    """A quantile of what a histogram has counted meanwhile, as if values lay evenly inside each bucket."""
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
