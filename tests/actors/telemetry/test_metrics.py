"""Metrics and the Prometheus text made of many actors' metrics."""

from __future__ import annotations

import json

import pytest

from pagebus.actors.telemetry.metrics import Metrics, of_actor, render, token_buckets


def test_counter_text() -> None:
    """A counter is shown with _total, its help and its labels."""
    metrics = Metrics()
    metrics.counter("vllm:request_success", "Requests that ended.", finished_reason="stop").inc(2)
    assert render([metrics.snapshot()]) == (
        "# HELP vllm:request_success_total Requests that ended.\n"
        "# TYPE vllm:request_success_total counter\n"
        'vllm:request_success_total{finished_reason="stop"} 2.0\n'
    )


def test_same_name_same_object() -> None:
    """Asking twice gives one series; other labels give another."""
    metrics = Metrics()
    first = metrics.gauge("g", "G.", a="1")
    assert metrics.gauge("g", "G.", a="1") is first
    assert metrics.gauge("g", "G.", a="2") is not first


def test_kind_of_a_name_is_fixed() -> None:
    """A name cannot be a counter and a gauge."""
    metrics = Metrics()
    metrics.counter("x", "X.")
    with pytest.raises(ValueError, match="x is a counter, not a gauge"):
        metrics.gauge("x", "X.")


def test_histogram_text() -> None:
    """Buckets are cumulative, a value equal to a bound is inside it, and +Inf equals the count."""
    metrics = Metrics()
    histogram = metrics.histogram("h_seconds", "H.", (0.5, 1.0))
    for value in (0.5, 0.7, 3.0):
        histogram.observe(value)
    assert render([metrics.snapshot()]).splitlines()[2:] == [
        'h_seconds_bucket{le="0.5"} 1.0',
        'h_seconds_bucket{le="1.0"} 2.0',
        'h_seconds_bucket{le="+Inf"} 3.0',
        "h_seconds_sum 4.2",
        "h_seconds_count 3.0",
    ]


def test_actors_are_summed() -> None:
    """Counters, histograms and plain gauges of many actors add up; a gauge of one engine stays its own."""
    snapshots = []
    for engine in ("0", "1"):
        metrics = Metrics()
        metrics.counter("c", "C.").inc(3)
        metrics.gauge("g", "G.").set(2)
        metrics.gauge("e", "E.", engine=engine).set(0.5)
        metrics.histogram("h", "H.", (1.0,)).observe(1)
        snapshots.append(json.loads(json.dumps(metrics.snapshot())))
    snapshots.append(snapshots[0] | {"series": [["e", {"engine": "0"}, {"value": 0.25}]]})
    lines = render([*snapshots, None], {"model_name": "m"}).splitlines()
    assert 'c_total{model_name="m"} 6.0' in lines
    assert 'g{model_name="m"} 4.0' in lines
    assert 'e{engine="0",model_name="m"} 0.25' in lines
    assert 'e{engine="1",model_name="m"} 0.5' in lines
    assert 'h_count{model_name="m"} 2.0' in lines


def test_what_actors_have_counted_stays_apart() -> None:
    """If one leaves, what the others have counted does not fall: Prometheus would take the rest for new. Gauges add up,
    but for those of something that all have in common."""
    told = {}
    for actor, count in (("a", 3), ("b", 5)):
        metrics = Metrics()
        metrics.counter("c", "C.").inc(count)
        metrics.counter("e", "E.", engine="x").inc(count)
        metrics.gauge("g", "G.").set(count)
        metrics.gauge("pagebus:jobs_queued", "All of them.").set(7)
        metrics.histogram("h", "H.", (1.0,)).observe(1)
        told[actor] = of_actor(metrics.snapshot(), actor)
    both, one = (set(render(each).splitlines()) for each in (told.values(), [told["b"]]))
    assert {line for line in both - one if line.startswith(("c_total", "h_count"))} == {
        'c_total{actor="a"} 3.0', 'h_count{actor="a"} 1.0',
    }  # fmt: skip
    assert {'c_total{actor="b"} 5.0', 'h_count{actor="b"} 1.0'} <= one
    assert {'e_total{engine="x"} 8.0', "g 8.0", "pagebus:jobs_queued 7.0"} <= both


def test_gauges_of_what_is_gone() -> None:
    """They can be taken away together; counters stay."""
    metrics = Metrics()
    for engine in ("a", "b"):
        metrics.gauge("g", "G.", engine=engine, more="x").set(1)
        metrics.counter("c", "C.", engine=engine).inc()
    metrics.drop(engine="a")
    assert [line for line in render([metrics.snapshot()]).splitlines() if "#" not in line] == [
        'c_total{engine="a"} 1.0', 'c_total{engine="b"} 1.0', 'g{engine="b",more="x"} 1.0',
    ]  # fmt: skip


def test_histograms_of_two_versions() -> None:
    """Other buckets under the same name are left out rather than added up wrongly."""
    old, new = Metrics(), Metrics()
    old.histogram("h", "H.", (1.0,)).observe(0.5)
    new.histogram("h", "H.", (1.0, 2.0)).observe(0.5)
    assert "h_count 1.0" in render([old.snapshot(), new.snapshot()])


def test_label_values_are_escaped() -> None:
    """Quotes, backslashes and line breaks in a label value cannot break the format."""
    metrics = Metrics()
    metrics.gauge("g", "line\nbreak", m='a"b\\c\nd').set(1)
    assert render([metrics.snapshot()]).splitlines() == [
        "# HELP g line\\nbreak",
        "# TYPE g gauge",
        'g{m="a\\"b\\\\c\\nd"} 1.0',
    ]


def test_buckets_must_increase() -> None:
    """A histogram without ordered bounds is refused."""
    with pytest.raises(ValueError, match="increasing"):
        Metrics().histogram("h", "H.", (2.0, 1.0))


def test_token_buckets() -> None:
    """1, 2, 5, 10 ... up to the longest request."""
    assert token_buckets(60) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)


def test_nothing_to_show() -> None:
    """No actor, no text."""
    assert render([]) == ""
