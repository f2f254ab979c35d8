"""Counters, gauges and histograms of one actor, and the Prometheus text made from those of all actors.

An actor changes its own :class:`Metrics` on its event loop. Once a second :mod:`pagebus.actors.runtime.actor` puts a
JSON snapshot on the bus. For ``/metrics`` the ingress merges all snapshots with :func:`render`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FINE_BUCKETS_S = tuple(float(f"{10 ** (step / 10):.3g}") for step in range(-40, 31))
"""A tenth of a decade each, from 0.1 ms to 1000 s: what quantiles are read from."""
ITERATION_TOKENS_BUCKETS = (1.0, *(float(2**n) for n in range(3, 15)))
STEP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.0, 2.0, 4.0)


def token_buckets(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``max_tokens``: vLLM's buckets for token counts."""
    series = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    return tuple(float(value) for value in series if value <= max_tokens) or (1.0,)


class Counter:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount`` >= 0."""
        self.value += amount

    def rise_to(self, total: float) -> None:
        """Show ``total``, which is counted elsewhere."""
        self.value = float(total)

    def data(self) -> dict[str, Any]:
        return {"value": self.value}


class Gauge:
    """Goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def data(self) -> dict[str, Any]:
        return {"value": self.value}


class Histogram:
    """Counts observations by upper bound; ``counts`` has one more entry than ``bounds``, for values above all.

    ``buckets`` are exported to Prometheus. ``fine`` are further bounds between these, for readers of quantiles from the
    snapshot: ``bounds`` then holds both, and the buckets' counts are sums.
    """

    __slots__ = ("bounds", "buckets", "counts", "total")

    def __init__(self, buckets: Sequence[float], fine: Sequence[float] = ()) -> None:
        if list(buckets) != sorted(set(buckets)) or not buckets:
            raise ValueError("buckets must be increasing and not empty")
        self.buckets = tuple(float(bound) for bound in buckets)
        self.bounds = tuple(sorted({*self.buckets, *fine}))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count ``value``, ``count`` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def data(self) -> dict[str, Any]:
        """``buckets`` with their ``counts`` and the ``sum``; ``fine``, if there are more bounds: all of them."""
        if self.bounds == self.buckets:
            return {"buckets": list(self.buckets), "counts": list(self.counts), "sum": self.total}
        counts = [0] * (len(self.buckets) + 1)
        for bound, count in zip(self.bounds, self.counts, strict=False):
            counts[bisect_left(self.buckets, bound)] += count
        counts[-1] += self.counts[-1]
        fine = {"buckets": list(self.bounds), "counts": list(self.counts)}
        return {"buckets": list(self.buckets), "counts": counts, "sum": self.total, "fine": fine}


Metric = TypeVar("Metric", Counter, Gauge, Histogram)
TYPES = {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}


class Metrics:
    """The metrics of one actor. Asking again for a name with the same labels gives the same object."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, tuple[tuple[str, str], ...]], Counter | Gauge | Histogram] = {}
        self._help: dict[str, tuple[str, str]] = {}

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        """A counter; ``_total`` is added to its name when it is shown, if missing."""
        return self._get(Counter(), name, help, labels)

    def gauge(self, name: str, help: str, **labels: str) -> Gauge:
        return self._get(Gauge(), name, help, labels)

    def only_gauge(self, name: str, help: str, **labels: str) -> Gauge:
        """The one gauge of this name: those with other labels are gone."""
        gauge = self.gauge(name, help, **labels)
        for key in [key for key, other in self._series.items() if key[0] == name and other is not gauge]:
            del self._series[key]
        return gauge

    def drop(self, **labels: str) -> None:
        """Take away all gauges with these labels: what they describe is gone, so zero would be wrong, too."""
        self._drop(labels, Gauge)

    def drop_all(self, **labels: str) -> None:
        """Take away all series with these labels: what they describe will not come back."""
        self._drop(labels, object)

    def _drop(self, labels: Mapping[str, str], kind: type) -> None:
        wanted = labels.items()
        gone = [key for key, each in self._series.items() if isinstance(each, kind) and wanted <= dict(key[1]).items()]
        for key in gone:
            del self._series[key]

    def histogram(
        self, name: str, help: str, buckets: Sequence[float], fine: Sequence[float] = (), **labels: str
    ) -> Histogram:
        return self._get(Histogram(buckets, fine), name, help, labels)

    def _get(self, new: Metric, name: str, help: str, labels: Mapping[str, str]) -> Metric:
        kind = TYPES[type(new)]
        if self._help.setdefault(name, (kind, help))[0] != kind:
            raise ValueError(f"metric {name} is a {self._help[name][0]}, not a {kind}")
        key = (name, tuple(sorted((label, str(value)) for label, value in labels.items())))
        found = self._series.setdefault(key, new)
        assert isinstance(found, type(new))
        return found

    def snapshot(self) -> dict[str, Any]:
        """All values as JSON: ``{"families": {name: [type, help]}, "series": [[name, labels, data], ...]}``."""
        return {
            "families": {name: list(family) for name, family in self._help.items()},
            "series": [[name, dict(labels), metric.data()] for (name, labels), metric in self._series.items()],
        }


# -- Prometheus text --------------------------------------------------------------------------------------------------

Labels = tuple[tuple[str, str], ...]
WHOLE = frozenset({"pagebus:jobs_queued"})
"""Gauges of something that all actors of a kind share: each shows all of it."""


def of_actor(snapshot: Mapping[str, Any], actor: str) -> Mapping[str, Any]:
    """A snapshot whose counters and histograms have the label ``actor``, unless they belong to an ``engine``.

    Their sum over actors would fall when one of them leaves, and Prometheus would count all that is left as new.
    """
    families = snapshot["families"]
    series = [
        [name, labels if families[name][0] == "gauge" or "engine" in labels else {"actor": actor, **labels}, data]
        for name, labels, data in snapshot["series"]
    ]
    return {"families": families, "series": series}


def render(snapshots: Iterable[Mapping[str, Any] | None], extra_labels: Mapping[str, str] | None = None) -> str:
    """Prometheus text (format 0.0.4) of many actors' snapshots together.

    Counters and histograms with the same labels are summed, and so are gauges, unless they have the label ``engine``:
    that one belongs to one executor, and the last snapshot wins, as of what all actors share. Histograms whose buckets
    differ from those met first (two versions at work) are left out. ``extra_labels`` are added to every series that
    does not have them.
    """
    families: dict[str, tuple[str, str]] = {}
    merged: dict[str, dict[Labels, dict[str, Any]]] = {}
    for snapshot in snapshots:
        if snapshot is None:
            continue
        for name, (kind, help) in snapshot["families"].items():
            families.setdefault(name, (kind, help))
        for name, labels, data in snapshot["series"]:
            key = tuple(sorted({**(extra_labels or {}), **labels}.items()))
            series = merged.setdefault(name, {})
            replace = families[name][0] == "gauge" and ("engine" in labels or name in WHOLE)
            series[key] = _merge(series.get(key), data, replace=replace)
    lines: list[str] = []
    for name in sorted(families):
        kind, help = families[name]
        shown = name + "_total" if kind == "counter" and not name.endswith("_total") else name
        lines += [f"# HELP {shown} {_escape_help(help)}", f"# TYPE {shown} {kind}"]
        for labels, data in sorted(merged.get(name, {}).items()):
            lines += (
                _histogram_lines(shown, labels, data) if kind == "histogram" else [_line(shown, labels, data["value"])]
            )
    return "\n".join(lines) + "\n" if lines else ""


def _merge(old: dict[str, Any] | None, new: Mapping[str, Any], *, replace: bool) -> dict[str, Any]:
    if old is None or replace:
        return dict(new)
    if "value" in new:
        return {"value": old["value"] + new["value"]}
    if old["buckets"] != new["buckets"]:
        return old
    counts = [a + b for a, b in zip(old["counts"], new["counts"], strict=True)]
    return {"buckets": old["buckets"], "counts": counts, "sum": old["sum"] + new["sum"]}


def _histogram_lines(name: str, labels: Labels, data: Mapping[str, Any]) -> list[str]:
    lines, running = [], 0
    for bound, count in zip([*map(_number, data["buckets"]), "+Inf"], data["counts"], strict=True):
        running += count
        lines.append(_line(f"{name}_bucket", (*labels, ("le", bound)), running))
    return [*lines, _line(f"{name}_sum", labels, data["sum"]), _line(f"{name}_count", labels, running)]


def _line(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{label}="{_escape_label(text)}"' for label, text in labels)
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


def _number(value: float) -> str:
    return str(float(value))


def _escape_label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
