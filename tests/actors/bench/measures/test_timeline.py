"""Spans of steps, as a trace, a picture and a summary."""

from __future__ import annotations

import json
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import pytest

from pagebus.actors.bench.measures.timeline import (
    LANES,
    Span,
    busy_and_gaps,
    chrome_trace,
    make_spans,
    picture,
    summary,
)
from pagebus.actors.bench.measures.watch import Step
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.spans import read_spans, spans_of


def step(number: int) -> Step:
    """Steps of 10 ms; each is planned one step ahead."""
    start_s = 10.0 + number / 100
    return Step(
        number=number,
        planned_s=start_s - 0.01,
        received_s=start_s - 0.008,
        launched_s=start_s - 0.007,
        done_s=start_s + 0.01,
        busy_s=0.009,
        decodes=4,
        decode_context=40,
        prefill_tokens=0,
        prefill_pairs=0.0,
        num_sampled=4,
    )


@pytest.fixture
def spans() -> tuple[list[Step], list[Span]]:
    """Three steps with what both actors noted."""
    steps = [step(number) for number in (5, 6, 7)]
    scheduler = [("land", 0, each.planned_s - 0.001, each.planned_s) for each in steps]
    scheduler += [("plan", 0, each.planned_s, each.planned_s + 0.001) for each in steps]
    executor = [("apply", each.number, each.launched_s, each.launched_s + 0.001) for each in steps]
    executor += [("launch", each.number, each.launched_s, each.launched_s + 0.003) for each in steps]
    executor += [("device", each.number, each.done_s - each.busy_s, each.done_s) for each in steps]
    return steps, make_spans(steps, sorted(scheduler, key=lambda each: each[2]), executor)


def test_every_lane_has_its_spans(spans: tuple[list[Step], list[Span]]) -> None:
    """Plans are on the bus from the end of planning to their receipt."""
    _, found = spans
    assert {span.lane for span in found} == {*LANES} - {"bus: results"}  # nothing was taken in after the last planning
    plan = next(span for span in found if span.name == "plan in flight" and span.step == 6)
    assert (plan.began_s, plan.ended_s) == pytest.approx((10.051, 10.052))
    assert [span.step for span in found if span.name == "plan"] == [5, 6, 7]


def test_of_plans_made_at_once_the_first_is_sent_first() -> None:
    """The span that begins with all of them is its own; it is on the bus from that span's end."""
    steps = [step(1), replace(step(2), planned_s=step(1).planned_s)]
    planned_s = steps[0].planned_s
    found = make_spans(steps, [("plan", 0, planned_s, planned_s + 0.0005)], [])
    assert [span.step for span in found if span.name == "plan"] == [1]
    (first,) = [span for span in found if span.name == "plan in flight" and span.step == 1]
    assert first.began_s == planned_s + 0.0005


def test_a_result_is_in_flight_until_it_is_taken_in() -> None:
    """The way back ends with the first taking in after the tokens were there."""
    steps = [step(1), step(2)]
    scheduler = [("land", 0, steps[0].done_s + 0.002, steps[0].done_s + 0.003)]
    found = make_spans(steps, scheduler, [])
    (result,) = [span for span in found if span.name == "result in flight"]
    assert result.step == 1
    assert result.ended_s - result.began_s == pytest.approx(0.002)


def test_the_trace_is_what_perfetto_reads(spans: tuple[list[Step], list[Span]]) -> None:
    """Complete events nest on their threads, messages in flight are pairs of asynchronous ones, all have names."""
    steps, found = spans
    events = json.loads(json.dumps(chrome_trace(found, steps)))["traceEvents"]
    begun = {(each["id"], each["cat"]) for each in events if each["ph"] == "b"}
    ended = {(each["id"], each["cat"]) for each in events if each["ph"] == "e"}
    assert begun == ended == {(number, "bus: plans") for number in (5, 6, 7)}
    complete = [each for each in events if each["ph"] == "X"]
    assert len(complete) == 5 * len(steps) - 1  # the first landing began before the first planning
    assert all(each["ts"] >= 0 and each["dur"] > 0 for each in complete)
    threads = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in complete} <= threads


def test_the_picture_is_a_drawing_with_all_lanes(spans: tuple[list[Step], list[Span]]) -> None:
    """The picture is valid and names its lanes."""
    steps, found = spans
    text = str(picture(found, "three steps", steps[0].planned_s, steps[-1].done_s))
    xml.dom.minidom.parseString(text)
    assert all(lane in text for lane in LANES)


def test_pauses_of_the_device() -> None:
    """Idle time is what lies between steps; overlapping steps leave none."""
    times = [(0.0, 1.0), (0.9, 2.0), (2.5, 4.0)]
    spans = [Span("device", "step", number, began, ended) for number, (began, ended) in enumerate(times, 1)]
    busy, gaps = busy_and_gaps(spans)
    assert busy == pytest.approx(1 - 0.5 / 4)
    assert gaps == [(0.5, 3), (0.0, 2)]
    assert "device busy 87.5%" in summary(spans)


def test_spans_are_written_and_read(tmp_path: Path) -> None:
    """What an actor noted can be read again; without a folder it notes nothing."""
    spans = spans_of(Settings(span_dir=str(tmp_path / "spans")), "executor-0")
    assert spans is not None
    spans.add("launch", 3, 1.5, 2.25)
    spans.write()
    assert read_spans(tmp_path / "spans" / "executor-0.jsonl") == [("launch", 3, 1.5, 2.25)]
    assert spans_of(Settings(), "executor-0") is None
