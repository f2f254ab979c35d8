"""The detokenizer actor: from the tokens of sequences to texts at their ingresses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from structlog.testing import capture_logs

from pagebus.actors.detokenizer import actor as module
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.metrics import render
from pagebus.bus.contract import START, BusRefused, EntryId
from pagebus.bus.messages import (
    END_GRAMMAR,
    END_LENGTH,
    END_NONE,
    AbortRequest,
    Message,
    ReplyBatch,
    RequestFailed,
    SchedulerLeads,
    SequenceEnded,
    StopSequence,
)
from tests.actors.detokenizer.world import NAMES, TEXT, TOKENS, World, joined, running, started, step, steps
from tests.dst.past import Past
from tests.helpers.tokenizer_factory import model_folder
from tests.helpers.waiting import until, until_empty


async def test_tokens_become_text_at_the_ingress(world: World, settings: Settings) -> None:
    """Whatever steps a read gets, the joined text, the end and the count are right, and the own stream is trimmed."""
    await world.executor("gpu-0")
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), started())
        messages = steps(TOKENS)
        await world.write(NAMES.results("gpu-0"), *messages[:3])
        await asyncio.sleep(0)
        await world.write(NAMES.results("gpu-0"), *messages[3:])
        rows = await world.replies()
        await until_empty(world.bus, NAMES.sequences("detok-0"))

    assert (TEXT, "length", len(TOKENS)) == joined(rows)


async def test_a_clients_error_is_no_failure_of_the_server(world: World, settings: Settings) -> None:
    """It is no error in the log, and has a counter of its own."""
    await world.executor("gpu-0")
    with capture_logs() as logged:
        async with running(world, settings) as actor:
            await world.write(NAMES.sequences("detok-0"), started())
            await world.write(NAMES.results("gpu-0"), step((1, 65, 0, END_GRAMMAR)))
            failures = await world.next(NAMES.replies("in-0"))
            counted = render([actor.metrics.snapshot()])

    assert [each.status for each in failures if isinstance(each, RequestFailed)] == [400]
    assert [each["log_level"] for each in logged if each["event"] == "request refused"] == ["info"]
    assert "pagebus:detokenizer_refused_total 1.0" in counted
    assert "pagebus:detokenizer_failed_total 0.0" in counted


async def test_what_an_earlier_life_was_told_is_passed_over(world: World, settings: Settings) -> None:
    """The scheduler announces it anew; until then nobody may want it any more, and nobody would say so."""
    await world.executor("gpu-0")
    await world.write(NAMES.sequences("detok-0"), started(1, ingress="gone"))
    await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
    async with running(world, settings) as actor:
        await until_empty(world.bus, NAMES.sequences("detok-0"))
        assert actor._sequences is not None
        assert len(actor._sequences) == 0
        await world.write(NAMES.sequences("detok-0"), started(2))
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS, sequence_id=2))
        rows = await world.replies()
        assert await world.bus.length(NAMES.replies("gone")) == 0

    assert (TEXT, "length", len(TOKENS)) == joined(rows)


async def test_what_had_been_trimmed_before_a_restart_is_trimmed_again(world: World, settings: Settings) -> None:
    """The server may have lost that, and nothing else may come for long."""
    async with running(world, settings) as actor:
        await world.write(NAMES.sequences("detok-0"), SchedulerLeads(epoch=1))
        past = Past(world.server)
        await until_empty(world.bus, NAMES.sequences("detok-0"))
        past.restore(world.server)
        actor.bus.on_restart()
        await until_empty(world.bus, NAMES.sequences("detok-0"))


async def test_what_an_earlier_scheduler_has_announced_is_forgotten(world: World, settings: Settings) -> None:
    """A new one leads, and announces anew what is still wanted; the drain waits for nothing else."""
    await world.executor("gpu-0")
    async with running(world, settings) as actor:
        await world.write(NAMES.sequences("detok-0"), started(1, ingress="gone"), SchedulerLeads(epoch=2), started(2))
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS, sequence_id=1), *steps(TOKENS, sequence_id=2))
        assert joined(await world.replies()) == (TEXT, "length", len(TOKENS))
        assert actor._sequences is not None
        assert len(actor._sequences) == 0
        assert await world.bus.length(NAMES.replies("gone")) == 0


async def test_stop_string_is_told_to_the_scheduler(world: World, settings: Settings) -> None:
    """The terminal reply and one StopSequence on the control stream."""
    await world.executor("gpu-0")
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), started(stop=("🎉",)))
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
        rows = await world.replies()
        controls = await world.next(NAMES.control)

    assert joined(rows)[:2] == ("Hello 你好 ", "stop")
    assert [StopSequence(request_id="r1", sequence_id=1)] == controls


async def test_many_starts_at_once_lose_no_tokens(
    world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are left unread while more sequences wait than one read holds."""
    monkeypatch.setattr(module, "READ_COUNT", 4)
    await world.executor("gpu-0")
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), *(started(i) for i in range(1, 31)))
        for index, token in enumerate(TOKENS):
            end = END_LENGTH if index == len(TOKENS) - 1 else END_NONE
            await world.write(NAMES.results("gpu-0"), step(*[(i, token, index, end) for i in range(1, 31)]))
        texts: dict[str, str] = {}
        ended: set[str] = set()
        while len(ended) < 30:
            for request_id, text, reason, _ in await world.replies():
                texts[request_id] = texts.get(request_id, "") + text
                ended |= {request_id} if reason else set()

    assert {f"r{i}": TEXT for i in range(1, 31)} == texts


async def test_errors_and_lost_tokens_answer_the_client(world: World, settings: Settings) -> None:
    """SequenceEnded with an error, and a gap, each give one RequestFailed; an abort gives nothing."""
    await world.executor("gpu-0")
    ends = [SequenceEnded(sequence_id=2, reason="error", message="no"), SequenceEnded(sequence_id=3, reason="abort")]
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), started(1), started(2), started(3), *ends)
        await world.write(NAMES.results("gpu-0"), step((1, 5, 1, END_NONE), (2, 5, 0, END_NONE), (3, 5, 0, END_NONE)))
        failed: list[Message] = []
        while len(failed) < 2:
            failed += await world.next(NAMES.replies("in-0"))

    assert {("r1", 500), ("r2", 500)} == {(m.request_id, m.status) for m in failed if isinstance(m, RequestFailed)}
    assert len(failed) == 2


async def test_entries_that_cannot_be_read_go_to_the_dead_letters(world: World, settings: Settings) -> None:
    """The rest of the stream is worked off."""
    await world.executor("gpu-0")
    world.server.append(NAMES.results("gpu-0"), (1, 1), {b"junk": b"x"})
    world.written[NAMES.results("gpu-0")] = 1
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), started())
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
        rows = await world.replies()

    assert (TEXT, "length", len(TOKENS)) == joined(rows)
    assert await world.bus.length(NAMES.dead_letters("detokenizer")) == 1


async def test_what_no_text_can_be_made_of_ends_its_request_alone(world: World, settings: Settings) -> None:
    """A sequence that cannot begin, and a step whose columns are malformed, each give one error: also if the step is
    the last one, after which no gap would show. The others are served."""
    await world.executor("gpu-0")
    ones = np.array([1], np.int32)
    async with running(world, settings) as actor:
        await world.write(NAMES.sequences("detok-0"), started(1), started(2, output_top_counts=ones), started(3))
        malformed = structs.replace(step((1, TOKENS[0], 0, END_LENGTH)), logprob_rows=ones - 1)
        await world.write(NAMES.results("gpu-0"), malformed, *steps(TOKENS, sequence_id=3))
        failures: list[Message] = []
        texts: list[ReplyBatch] = []
        while not (len(failures) == 2 and any(any(each.finish_reasons) for each in texts)):
            for message in await world.next(NAMES.replies("in-0")):
                texts += [message] if isinstance(message, ReplyBatch) else []
                failures += [] if isinstance(message, ReplyBatch) else [message]
        controls = await world.next(NAMES.control)
        assert actor._sequences is not None
        assert len(actor._sequences) == 0

    assert sorted((each.request_id, each.status) for each in failures if isinstance(each, RequestFailed)) == [
        ("r1", 500),
        ("r2", 500),
    ]
    assert {name for each in texts for name in each.request_ids} == {"r3"}
    assert {each.request_id for each in controls if isinstance(each, AbortRequest)} <= {"r1", "r2"}
    assert await world.bus.length(NAMES.dead_letters("detokenizer")) == 2


async def test_drain_waits_for_the_sequences_under_way(world: World, settings: Settings) -> None:
    """Told to stop, it still ends what it has."""
    await world.executor("gpu-0")
    async with running(world, settings) as actor:
        await world.write(NAMES.sequences("detok-0"), started())
        await until_empty(world.bus, NAMES.sequences("detok-0"))
        actor.request_drain()
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
        rows = await world.replies()

    assert (TEXT, "length", len(TOKENS)) == joined(rows)


async def test_a_drain_outlasts_a_bus_that_takes_no_writes(world: World, settings: Settings) -> None:
    """What it has read is trimmed as soon as the bus takes it."""
    async with running(world, settings) as actor:
        trim, refused = actor.bus.trim, [BusRefused("out of memory")] * 2

        async def trim_later(stream: str, through: EntryId) -> int:
            if not actor.draining.is_set() or refused:
                raise refused.pop() if actor.draining.is_set() else BusRefused("out of memory")
            return await trim(stream, through)

        actor.bus.trim = trim_later  # type: ignore[method-assign]
        await world.write(NAMES.sequences("detok-0"), SchedulerLeads(epoch=1))
        await until(lambda: actor._sequences_position > START)
    assert await world.bus.length(NAMES.sequences("detok-0")) == 0


async def test_model_without_tokenizer_counts_tokens(world: World, tmp_path: Path) -> None:
    """Texts are empty, everything else is as always."""
    await world.executor("gpu-0")
    async with running(world, Settings(model=str(model_folder(tmp_path, None)))):
        await world.write(NAMES.sequences("detok-0"), started())
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
        rows = await world.replies()

    assert ("", "length", len(TOKENS)) == joined(rows)
