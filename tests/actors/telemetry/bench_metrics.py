"""Compares the cost of a metric and of a scrape with prometheus-client.

Run: ``python -m tests.actors.telemetry.bench_metrics``. It needs ``pip install prometheus-client``, which Pagebus does
not install. The scrape is that of a deployment with the shipped model after one answer. Times are processor time, the
least of several rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any
from unittest.mock import patch

from pagebus import LLM, SamplingParams
from pagebus.actors.telemetry import metrics as own
from pagebus.web.telemetry import metrics as web_metrics

library: Any = import_module("prometheus_client")
families: Any = import_module("prometheus_client.metrics_core")
ROUNDS = 15


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Processor time of a call, the least of the rounds."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time_ns()
        for _ in range(calls):
            call()
        times.append((time.process_time_ns() - start) / 1000 / calls)
    return min(times)


def snapshots_of_a_deployment() -> list[dict[str, Any]]:
    """What the ingress merges for a scrape after one answer."""
    seen: list[list[dict[str, Any]]] = []

    def keep(snapshots: Iterable[Any], extra_labels: Any = None) -> str:
        seen.append(list(snapshots))
        return ""

    with LLM(device="cpu", threads=1) as llm, patch.object(web_metrics, "render", keep):
        llm.generate("Water is", SamplingParams(max_tokens=8))
        client = llm._system.client
        time.sleep(2)  # every actor has put a snapshot on the bus by then
        request = import_module("urllib.request")
        url = f"{client.url}/metrics"
        request.urlopen(request.Request(url, headers={"Authorization": f"Bearer {client.api_key}"})).read()
    return seen[-1]


class Collected:
    """The snapshots as a collector of the library, so that its code writes the text. They are merged by the caller."""

    def __init__(self, snapshots: list[dict[str, Any]]) -> None:
        self.snapshots = snapshots

    def collect(self) -> Iterable[Any]:
        kinds: dict[str, tuple[str, str]] = {}
        merged: dict[str, dict[own.Labels, dict[str, Any]]] = {}
        for snapshot in self.snapshots:
            kinds.update(snapshot["families"])
            for name, labels, data in snapshot["series"]:
                key = tuple(sorted({"model_name": "pagebus", **labels}.items()))
                series = merged.setdefault(name, {})
                series[key] = own._merge(series.get(key), data, replace="engine" in labels)
        for name in sorted(kinds):
            yield self.family(name, *kinds[name], merged.get(name, {}))

    def family(self, name: str, kind: str, help: str, series: dict[own.Labels, dict[str, Any]]) -> Any:
        types = {"counter": "CounterMetricFamily", "gauge": "GaugeMetricFamily", "histogram": "HistogramMetricFamily"}
        labels = tuple(sorted({label for key in series for label, _ in key}))
        found = getattr(families, types[kind])(name, help, labels=labels)
        for key, data in sorted(series.items()):
            values = [dict(key).get(label, "") for label in labels]
            if kind != "histogram":
                found.add_metric(values, data["value"])
                continue
            running, buckets = 0, []
            for bound, count in zip([*map(str, data["buckets"]), "+Inf"], data["counts"], strict=True):
                running += count
                buckets.append((bound, running))
            found.add_metric(values, buckets, data["sum"])
        return found


def main() -> None:
    ours, registry = own.Metrics(), library.CollectorRegistry()
    our_counter, their_counter = ours.counter("c", "C."), library.Counter("c", "C.", registry=registry)
    few, many = own.TTFT_BUCKETS_S, own.FINE_BUCKETS_S
    our_few, our_many = ours.histogram("few", "F.", few), ours.histogram("many", "M.", many)
    their_few, their_many = (
        library.Histogram(name, "H.", buckets=buckets, registry=registry) for name, buckets in (("f", few), ("m", many))
    )

    def their_rows() -> None:
        for _ in range(256):
            their_few.observe(0.03)

    print(f"{'microseconds':34}{'own':>9}{'library':>9}")
    for what, mine, other, calls in (
        ("inc", our_counter.inc, their_counter.inc, 2000),
        (f"observe, {len(few)} buckets", lambda: our_few.observe(0.03), lambda: their_few.observe(0.03), 2000),
        (f"observe, {len(many)} buckets", lambda: our_many.observe(0.03), lambda: their_many.observe(0.03), 2000),
        ("observe for 256 rows", lambda: our_few.observe(0.03, 256), their_rows, 50),
    ):
        print(f"{what:34}{microseconds(mine, calls):9.2f}{microseconds(other, calls):9.2f}")
    scrape(snapshots_of_a_deployment())


def scrape(snapshots: list[dict[str, Any]]) -> None:
    """Compare the text of all metrics, and how long it takes to write."""
    scrapes: Any = library.CollectorRegistry()
    scrapes.register(Collected(snapshots))
    text = own.render(snapshots, {"model_name": "pagebus"})
    count = sum(line.startswith("# TYPE") for line in text.splitlines())
    mine_us = microseconds(lambda: own.render(snapshots, {"model_name": "pagebus"}), 20)
    theirs_us = microseconds(lambda: library.generate_latest(scrapes), 20)
    print(f"{f'a scrape, {count} families, {len(snapshots)} actors':34}{mine_us:9.0f}{theirs_us:9.0f}")
    theirs = library.generate_latest(scrapes).decode()
    print(f"lines of text: {len(text.splitlines())}, {len(theirs.splitlines())}")


if __name__ == "__main__":
    main()
