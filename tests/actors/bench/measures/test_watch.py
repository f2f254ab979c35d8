"""Watching a deployment's streams; here they are written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pagebus.actors.bench.driver.deployment import BenchError, Deployment
from pagebus.actors.bench.driver.requests import INGRESS
from pagebus.actors.bench.measures.watch import BUSY, Run, Watch
from pagebus.actors.runtime.actor import metrics_state
from pagebus.bus.contract import START, EntryId, LogEntry
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import (
    END_LENGTH,
    END_NONE,
    GenerateRequest,
    Message,
    NewSequence,
    RequestFailed,
    RequestsDone,
    SamplingParams,
    SequenceStarted,
    StepPlan,
    StepResult,
)
from pagebus.bus.streams import Names
from tests.helpers.waiting import eventually

NAMES = Names("bench")
STEPS, RESULTS, SEQUENCES = NAMES.steps("executor-0"), NAMES.results("executor-0"), NAMES.sequences("detokenizer-0")


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def started(sequence: int, request: str) -> SequenceStarted:
    return SequenceStarted(
        request_id=request, sequence_id=sequence, choice_index=0, ingress=INGRESS, num_prompt_tokens=3,
        num_cached_tokens=1, max_tokens=2, sampling=SamplingParams(),
    )  # fmt: skip


def plans() -> list[StepPlan]:
    """A prompt of 3 with one cached token, then one decode of it."""
    new = NewSequence(
        sequence_id=7, slot=0, num_tokens=3, num_prompt_tokens=3, num_computed_tokens=1, num_blocks=1,
        max_total_tokens=5, seed=0, sampling=SamplingParams(),
    )  # fmt: skip
    return [
        StepPlan(step=1, planned_s=1.0, num_decodes=0, new_sequences=(new,), slots=ints(0), num_scheduled=ints(2)),
        StepPlan(step=2, planned_s=2.0, num_decodes=1, slots=ints(0), num_scheduled=ints(1)),
    ]


def results() -> list[StepResult]:
    """The two tokens; beside the first is one of somebody else's."""
    return [
        StepResult(
            step=1, scheduler_epoch=1, received_s=1.1, launched_s=1.2, done_s=1.5, num_computed_tokens=2, busy_s=0.2,
            sequence_ids=ints(99, 7), token_ids=ints(5, 5), token_indexes=ints(0, 0), ends=ints(END_NONE, END_NONE),
        ),
        StepResult(
            step=2, scheduler_epoch=1, received_s=2.1, launched_s=2.2, done_s=2.5, num_computed_tokens=1, busy_s=0.3,
            sequence_ids=ints(7), token_ids=ints(5), token_indexes=ints(1), ends=ints(END_LENGTH),
        ),
    ]  # fmt: skip


def entries(stream: str, messages: Sequence[Message], first: int = 1) -> list[LogEntry]:
    return [LogEntry(stream, EntryId(1, index), message) for index, message in enumerate(messages, first)]


def watch(bus: MemoryBus) -> Watch:
    return Watch(Deployment(
        bus=bus, bus_url="", names=NAMES, executor="executor-0", scheduler="scheduler-0",
        detokenizers=("detokenizer-0",), info={},
        base_url="", started_s=0.0, redis_s=0.0, ready_s=0.0, log=Path(),
    ))  # fmt: skip


async def watched(
    bus: MemoryBus,
    log: Sequence[LogEntry],
    *mails: tuple[str, Message],
    by: Watch | None = None,
    scheduler: bool = False,
) -> Run:
    """A run of one request, during which these entries are written."""
    request = GenerateRequest(
        request_id="r", ingress=INGRESS, sampling=SamplingParams(max_tokens=2), prompt_token_ids=ints(1, 2, 3)
    )

    async def submitted() -> bool:
        return await bus.length(NAMES.requests) == 1

    running = asyncio.create_task((by or watch(bus)).run([request], scheduler=scheduler))
    try:
        await eventually(submitted)
        await bus.append(log)
        await bus.publish(mails)
        return await running
    finally:
        running.cancel()


@pytest.fixture
async def bus() -> MemoryBus:
    """A bus in memory, connected."""
    bus = MemoryBus(MemoryServer(), NAMES)
    await bus.connect()
    return bus


async def test_steps_and_tokens_are_those_of_the_run(bus: MemoryBus) -> None:
    """Steps with what they computed and when; tokens of the submitted requests only."""
    log = [*entries(SEQUENCES, [started(7, "r")]), *entries(STEPS, plans()), *entries(RESULTS, results())]
    run = await watched(bus, log)
    first, second = run.steps
    assert (first.prefill_tokens, first.decodes, first.prefill_pairs, first.num_sampled) == (2, 0, 5.0, 2)
    assert (second.prefill_tokens, second.decodes, second.decode_context, second.num_sampled) == (0, 1, 4, 1)
    assert (second.planned_s, second.received_s, second.launched_s, second.done_s) == (2.0, 2.1, 2.2, 2.5)
    assert (run.requests.tolist(), run.token_indexes.tolist(), run.token_s.tolist()) == ([0, 0], [0, 1], [1.5, 2.5])
    assert (run.cached_tokens, run.prompt_tokens, run.scheduler_s) == (1, 3, None)


async def test_answers_are_confirmed_as_by_an_ingress(bus: MemoryBus) -> None:
    """So the scheduler need not keep them beside the next run."""
    await watched(bus, [*entries(SEQUENCES, [started(7, "r")]), *entries(STEPS, plans()), *entries(RESULTS, results())])

    (told,) = await bus.read({NAMES.control: START}, count=10, block_ms=0)
    assert told.message == RequestsDone(request_ids=("r",), attempts=("",))


async def test_a_request_that_fails_ends_the_benchmark(bus: MemoryBus) -> None:
    """With what its client would have been told."""
    failed = RequestFailed(request_id="r", status=400, error_type="x", message="too long")
    with pytest.raises(BenchError, match="request r failed: too long"):
        await watched(bus, [], (NAMES.replies(INGRESS), failed))


async def test_steps_that_were_trimmed_unread_end_the_benchmark(bus: MemoryBus) -> None:
    """A hole in a stream would be a hole in the figures."""
    log = [*entries(SEQUENCES, [started(7, "r")]), *entries(STEPS, plans()[1:], first=2), *entries(RESULTS, results())]
    await bus.append(entries(STEPS, [StepPlan(step=0, planned_s=0.0, num_decodes=0)], first=0))
    with pytest.raises(BenchError, match="unread"):
        await watched(bus, log)


class Publishing(MemoryBus):
    """Whoever reads the scheduler's metrics finds the next of these: when they were published, and the busy time."""

    def __init__(self, *published: tuple[float, float]) -> None:
        super().__init__(MemoryServer(), NAMES)
        self._published = iter(published)

    async def get_state(self, *names: str) -> list[dict[str, Any] | None]:
        assert names == (metrics_state("scheduler", "scheduler-0"),)
        time_s, busy_s = next(self._published)
        return [{"time_s": time_s, "series": [[BUSY, {}, {"value": busy_s}], ["pagebus:other", {}, {"value": 9.0}]]}]


async def test_the_schedulers_time_is_counted_from_the_end_of_the_run_before() -> None:
    """What it had published before it was through with the last run, or with this one, is not looked at."""
    bus = Publishing((1.0, 3.0), (2.55, 3.5), (2.7, 4.0), (4.0, 4.5), (4.7, 6.0))
    await bus.connect()
    log = [*entries(SEQUENCES, [started(7, "r")]), *entries(STEPS, plans()), *entries(RESULTS, results())]
    later = [replace(result, done_s=result.done_s + 2.0) for result in results()]
    again = [
        *entries(SEQUENCES, [started(7, "r")], first=2),
        *entries(STEPS, plans(), first=3),
        *entries(RESULTS, later, first=3),
    ]
    watcher = watch(bus)
    assert (await watched(bus, log, by=watcher)).scheduler_s is None
    await bus.delete(NAMES.requests)
    assert (await watched(bus, again, by=watcher, scheduler=True)).scheduler_s == 6.0 - 4.0
