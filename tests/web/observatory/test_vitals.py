"""Figures of a span of time, from metrics before and after it; and the rings in which they are kept."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.telemetry.metrics import TTFT_BUCKETS_S, Metrics
from pagebus.bus.contract import LeaseInfo
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.observatory.history import History, Ring
from pagebus.web.observatory.roster import GONE_S, Roster
from pagebus.web.observatory.vitals import FIGURES, ITL, QUANTILES_OVER_S, TTFT, Spans, Totals, figures, total
from pagebus.web.telemetry.metrics import IngressMetrics


def told(before: Metrics | None, after: Metrics, span_s: float = 2.0) -> dict[str, float | None]:
    start = total([before.snapshot()] if before else [], 10.0)
    return dict(zip(FIGURES, figures(start, total([after.snapshot(), None], 10.0 + span_s)), strict=True))


def test_quantiles_are_of_what_came_meanwhile() -> None:
    """What was there before does not count; inside a bucket values are held to lie evenly."""
    before, after = Metrics(), Metrics()
    for metrics in (before, after):
        metrics.histogram(TTFT, "", (0.1, 0.2, 0.4)).observe(0.3, 1000)
    after.histogram(TTFT, "", (0.1, 0.2, 0.4)).observe(0.15, 10)
    found = told(before, after)
    assert found["ttft_p50_s"] == pytest.approx(0.15)
    assert found["ttft_p99_s"] == pytest.approx(0.199)
    assert found["itl_p50_s"] is None


def test_quantiles_come_from_fine_buckets() -> None:
    """Within a few percent, where Prometheus is told of 0.25 and 0.5 s only; it is told of no more than before."""
    after = Metrics()
    seen = IngressMetrics(after)
    seen._times.first_token.observe(0.31, 100)
    assert told(None, after)["ttft_p50_s"] == pytest.approx(0.31, rel=0.13)
    (data,) = [data for name, _, data in after.snapshot()["series"] if name == TTFT]
    assert data["buckets"] == list(TTFT_BUCKETS_S)
    assert [count for count in data["counts"] if count] == [100]
    assert data["counts"][TTFT_BUCKETS_S.index(0.5)] == 100


def test_quantiles_reach_back_half_a_minute() -> None:
    """Rates are of the last two seconds; a percentile of these would be one of a handful of requests. What is older
    than that does not count, and when nothing has happened for so long there is none."""
    metrics, spans = Metrics(), Spans()
    seen = metrics.histogram(TTFT, "", (0.1, 1.0))
    p50 = []
    for at_s in range(0, 80, 2):
        if at_s == 10:
            seen.observe(0.5, 10)
        found = spans.next(total([metrics.snapshot()], float(at_s)))
        p50.append(None if found is None else found[FIGURES.index("ttft_p50_s")])
    shown = [at_s for at_s, value in zip(range(0, 80, 2), p50, strict=True) if value is not None]
    assert shown == list(range(10, 10 + int(QUANTILES_OVER_S), 2))


def test_failures_are_counted_by_what_they_are() -> None:
    """Refused, timed out, the client's or the server's fault; who has left is no error, and what was cancelled has
    not finished."""
    before, after = Metrics(), Metrics()
    counts = IngressMetrics(before), IngressMetrics(after)
    for status, count in ((429, 8), (408, 4), (400, 2), (500, 6), (499, 100), (200, 50)):
        for _ in range(count):
            counts[1].http("POST", "/v1/completions", status, 0.1)
    counts[1]._success("stop", 20)
    counts[1]._success("abort", 2)
    found = told(before, after)
    names = ("refused_per_s", "timeouts_per_s", "client_errors_per_s", "server_errors_per_s")
    assert [found[name] for name in names] == [4.0, 2.0, 7.0, 3.0]
    assert (found["requests_per_s"], found["cancelled_per_s"]) == (10.0, 1.0)


def test_rates_and_shares() -> None:
    """Counters by the second; the hit rate of what was looked up meanwhile; usage as the mean of all replicas."""
    before, after = Metrics(), Metrics()
    for metrics, count in ((before, 100), (after, 160)):
        metrics.counter("vllm:generation_tokens", "").inc(count)
        metrics.counter("vllm:prefix_cache_queries", "", engine="a").inc(count)
        metrics.counter("vllm:prefix_cache_hits", "", engine="a").inc(count / 4)
    after.gauge("vllm:kv_cache_usage_perc", "", engine="a").set(0.5)
    after.gauge("vllm:kv_cache_usage_perc", "", engine="b").set(0.1)
    found = told(before, after)
    assert (found["output_tokens_per_s"], found["hit_rate"]) == (30.0, 0.25)
    assert found["kv_usage"] == pytest.approx(0.3)


def test_an_actor_that_begins_anew_gives_no_negative_figures() -> None:
    before, after = Metrics(), Metrics()
    before.counter("vllm:generation_tokens", "").inc(100)
    before.histogram(ITL, "", (0.1,)).observe(0.05, 10)
    after.histogram(ITL, "", (0.1,)).observe(0.05, 3)
    found = told(before, after)
    assert (found["output_tokens_per_s"], found["itl_p50_s"]) == (0.0, None)


def test_a_ring_is_bounded_and_samples_no_more_often_than_it_should() -> None:
    ring = Ring(2.0, 3)
    for at_s in range(0, 40):
        ring.sample(Totals(float(at_s)))
    assert [sample[0] for sample in ring.samples] == [34.0, 36.0, 38.0]


def test_a_clock_that_is_set_back() -> None:
    """Samples go on at once, with true rates and in order; what lies in the future now is dropped."""
    ring = Ring(2.0, 9)
    for tokens, at_s in enumerate((7190.0, 7192.0, 7194.0, 20.0, 22.0, 24.0)):
        ring.sample(Totals(at_s, {"vllm:generation_tokens": 100.0 * tokens}))
    rate = 1 + FIGURES.index("output_tokens_per_s")
    assert [(sample[0], sample[rate]) for sample in ring.samples] == [(22.0, 50.0), (24.0, 50.0)]
    assert ring.stored_s == 20.0, "the next one is stored in ten seconds"


async def test_the_next_ingress_goes_on_with_the_history() -> None:
    """What one has stored, the next one shows, and one that does not keep it reads it from the bus."""
    bus = MemoryBus(MemoryServer())
    now_s = 1e9

    async def totals() -> Totals:
        return Totals(now_s)

    first = History(bus, totals, lambda: True)
    for _ in range(4):
        await first._turn()
        now_s += 20.0
    taken = [sample[0] for sample in first._rings[0].samples]
    assert len(taken) == 3
    for other in (History(bus, totals, lambda: True), History(bus, totals, lambda: False)):
        await other._turn()
        shown = other._rings[0].samples if other._keeps else (await other._stored())[0]["samples"]
        assert [sample[0] for sample in shown] == taken
    await bus.close()


def lease(name: str, epoch: int, **info: Any) -> LeaseInfo:
    return LeaseInfo("executor", name, epoch, {"state": "ready", "actor": name, **info})


def test_the_roster_shows_who_is_gone_and_back() -> None:
    """An actor whose lease ends is gone; with another epoch it has been started again; in the end it is forgotten."""
    roster = Roster()
    roster.update([lease("a", 1), lease("b", 2)], 100.0)
    roster.update([lease("b", 2)], 101.0)
    assert [(row["name"], row["state"], row["restarts"]) for row in roster.rows({}, 101.0)] == [
        ("a", "gone", 0), ("b", "ready", 0),
    ]  # fmt: skip
    assert roster.find("executor", "a") is None
    roster.update([lease("a", 3), lease("b", 2)], 102.0)
    assert [(row["name"], row["state"], row["restarts"]) for row in roster.rows({}, 102.0)] == [
        ("a", "ready", 1), ("b", "ready", 0),
    ]  # fmt: skip
    roster.update([], 103.0)
    roster.update([], 104.0 + GONE_S)
    assert roster.rows({}, 104.0 + GONE_S) == []


def test_the_roster_says_since_when_somebody_is_missed() -> None:
    """From the end of one life until the next is ready, also if no look fell between; and whether it was drained."""
    roster = Roster()
    roster.update([lease("a", 1), lease("b", 1), lease("c", 1)], 100.0)
    roster.update([lease("b", 2, state="loading"), lease("c", 1, state="draining")], 101.0)
    roster.update([lease("a", 3, state="loading"), lease("b", 2, state="loading")], 102.0)
    rows = {row["name"]: row for row in roster.rows({}, 103.0)}
    assert [(rows[name]["lost_s"], rows[name]["drained"]) for name in "abc"] == [
        (101.0, False), (101.0, False), (102.0, True),
    ]  # fmt: skip
    roster.update([lease("a", 3), lease("b", 2)], 104.0)
    rows = {row["name"]: row for row in roster.rows({}, 104.0)}
    assert [rows[name]["lost_s"] for name in "abc"] == [None, None, 102.0]


def test_the_roster_shows_rates() -> None:
    """CPU seconds, busy seconds and steps by the second, between two looks."""
    roster, metrics = Roster(), Metrics()
    roster.update([lease("a", 1)], 100.0)
    for at_s, steps in ((100.0, 10), (102.0, 30)):
        counter = metrics.counter("pagebus:executor_steps_total", "", engine="a")
        counter.inc(steps - counter.value)
        (row,) = roster.rows({"executor:a": metrics.snapshot()}, at_s)
    assert (row["rate"], row["unit"]) == (10.0, "steps/s")


def test_the_roster_shows_attention_paths() -> None:
    """The shares of the steps between two looks, the largest first; none where there were no steps."""
    roster, metrics, shown = Roster(), Metrics(), []
    roster.update([lease("a", 1)], 100.0)
    for at_s, fused, mixed in ((100.0, 10, 5), (102.0, 13, 6), (104.0, 13, 6)):
        for path, steps in (("decode_prefill", mixed), ("fused_decode", fused)):
            counter = metrics.counter("pagebus:attention_steps_total", "", engine="a", path=path)
            counter.inc(steps - counter.value)
        (row,) = roster.rows({"executor:a": metrics.snapshot()}, at_s)
        shown.append(row["paths"])
    assert shown == [{}, {"fused_decode": 0.75, "decode_prefill": 0.25}, {}]
    assert list(shown[1]) == ["fused_decode", "decode_prefill"]


def test_the_roster_shows_the_load_of_experts() -> None:
    """By layer, in their order; nothing of layers that have seen no token, and of models without experts."""
    roster, metrics = Roster(), Metrics()
    roster.update([lease("a", 1)], 100.0)
    (row,) = roster.rows({"executor:a": metrics.snapshot()}, 100.0)
    assert row["experts"] == []
    for layer, load, unused in (("10", 1.5, 0), ("2", 4.0, 3), ("3", 0.0, 0)):
        metrics.gauge("pagebus:expert_load_ratio", "", engine="a", layer=layer).set(load)
        metrics.gauge("pagebus:experts_unused", "", engine="a", layer=layer).set(unused)
    (row,) = roster.rows({"executor:a": metrics.snapshot()}, 101.0)
    assert row["experts"] == [[2, 4.0, 3], [10, 1.5, 0]]


def test_the_roster_shows_captures() -> None:
    """As a phase with its share, until all graphs are there."""
    roster = Roster()
    shown = []
    for info in ({}, {"num_graphs": 24, "num_planned_graphs": 96}, {"num_graphs": 96, "num_planned_graphs": 96}):
        roster.update([lease("a", 1, **info)], 100.0)
        (row,) = roster.rows({}, 100.0)
        shown.append((row["state"], row["phase"], row["progress"]))
    assert shown == [("ready", None, None), ("ready", "graphs", 0.25), ("ready", None, None)]


def test_the_roster_shows_the_memory_of_a_gpu() -> None:
    """Used and all of it, where an executor tells of it."""
    roster, metrics = Roster(), Metrics()
    roster.update([lease("a", 1)], 100.0)
    (row,) = roster.rows({"executor:a": metrics.snapshot()}, 100.0)
    assert (row["gpu_memory_bytes"], row["gpu_capacity_bytes"]) == (None, None)
    metrics.gauge("pagebus:gpu_memory_bytes", "", engine="a").set(5)
    metrics.gauge("pagebus:gpu_memory_capacity_bytes", "", engine="a").set(8)
    (row,) = roster.rows({"executor:a": metrics.snapshot()}, 101.0)
    assert (row["gpu_memory_bytes"], row["gpu_capacity_bytes"]) == (5, 8)
