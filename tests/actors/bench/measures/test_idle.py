"""What a device did in a run, and what it waited for."""

from __future__ import annotations

import pytest

from pagebus.actors.bench.measures.idle import pauses, report
from pagebus.actors.bench.measures.timeline import Span, make_spans
from pagebus.actors.bench.measures.watch import Step

MS = 1e-3


def step(number: int, planned_ms: float, received_ms: float, launched_ms: float, prefill_tokens: int = 0) -> Step:
    """A step of four decodes; times are given in milliseconds."""
    return Step(
        number=number, planned_s=planned_ms * MS, received_s=received_ms * MS, launched_s=launched_ms * MS,
        done_s=(10 * number + 8) * MS, busy_s=8 * MS, decodes=4, decode_context=40, prefill_tokens=prefill_tokens,
        prefill_pairs=0.0, num_sampled=4,
    )  # fmt: skip


def device(number: int) -> tuple[str, int, float, float]:
    """From 10 ms times the number on, for 8 ms."""
    return ("device", number, 10 * number * MS, (10 * number + 8) * MS)


def test_a_pause_belongs_to_what_the_next_step_waited_for() -> None:
    """Of the 2 ms before each step: planned late, received late, taken late, launched late; and all of them in turn."""
    steps = [
        step(1, 0, 0, 0), step(2, 20, 20, 20), step(3, 0, 30, 30), step(4, 0, 0, 40), step(5, 0, 0, 41),
        step(6, 58.5, 59, 59.5),
    ]  # fmt: skip
    executor = [("launch", each.number, each.launched_s, each.launched_s + 0.5 * MS) for each in steps]
    spans = make_spans(steps, [], executor + [device(each.number) for each in steps])

    idle = pauses(steps, spans)

    assert [sum(times) / MS for times in zip(*(pause.waited_s for pause in idle), strict=True)] == pytest.approx(
        [2.5] * 4
    )
    assert [pause.seconds / MS for pause in idle] == pytest.approx([2.0] * 5)
    assert [pause.began_s / MS for pause in idle] == pytest.approx([18, 28, 38, 48, 58])


def test_steps_are_counted_by_kind() -> None:
    """With prompts or without, from a graph or not; captures are told."""
    steps = [step(1, 0, 0, 0), step(2, 10, 10, 10, prefill_tokens=7), step(3, 20, 20, 20, prefill_tokens=9)]
    executor = [
        ("launch", 1, 0.0, 1 * MS), ("launch", 2, 10 * MS, 11 * MS), ("launch without graph", 3, 20 * MS, 29 * MS),
        ("capture", 0, 11 * MS, 18 * MS), *map(device, (1, 2, 3)),
    ]  # fmt: skip
    lines = report(steps, make_spans(steps, [], executor)).splitlines()

    assert [line.split()[:-4] for line in lines[1:4]] == [
        ["decodes,", "graph", "1"], ["with", "prompts,", "graph", "1"], ["with", "prompts,", "no", "graph", "1"]
    ]  # fmt: skip
    assert [line.split()[-2] for line in lines[1:4]] == ["4.0", "11.0", "13.0"]
    assert lines[4] == "1 graphs captured meanwhile, in 0.007 s"
    assert lines[6] == "longest pauses, ms: 2.0 after 0.02 s (its launch), 2.0 after 0.03 s (its launch)"


def test_steps_of_which_the_device_notes_nothing_are_left_out() -> None:
    """The spans may begin later than the steps."""
    steps = [step(1, 0, 0, 0), step(2, 0, 0, 0)]
    assert pauses(steps, [Span("device", "step", 2, 0.02, 0.028)]) == []
