"""The detokenizer actor on a memory bus with hand-made streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tokenizer_factory import byte_level, model_folder

from actors.detokenizer import actor as module
from actors.detokenizer.actor import DetokenizerActor
from actors.settings import Settings
from bus.contract import FENCE_INDEX, START, BusRefused, BusUnavailable, Entry, EntryId, LogEntry
from bus.memory_bus import MemoryBus, MemoryServer
from bus.messages import (
    END_LENGTH,
    END_NONE,
    Message,
    ReplicaFenced,
    ReplyBatch,
    RequestFailed,
    SchedulerLeads,
    SequenceEnded,
    SequenceStarted,
    StepResult,
    StopSequence,
)
from bus.streams import Names
from tests.dst.past import Past
from tests.waiting import until, until_empty

NAMES = Names()
TEXT = "Hello 你好 🎉 world"
TOKENS: list[int] = byte_level().encode(TEXT).ids


def started(sequence_id: int = 1, **changes: Any) -> SequenceStarted:
    fields: dict[str, Any] = {
        "request_id": f"r{sequence_id}",
        "sequence_id": sequence_id,
        "choice_index": 0,
        "ingress": "in-0",
        "num_prompt_tokens": 7,
        "num_cached_tokens": 0,
        "max_tokens": 100,
        "min_tokens": 0,
    }
    return SequenceStarted(**(fields | changes))


def step(*rows: tuple[int, int, int, int]) -> StepResult:
    """A step of (sequence id, token id, token index, end) rows."""
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    return StepResult(
        step=1, scheduler_epoch=1, received_s=0, launched_s=0, done_s=0, num_computed_tokens=len(rows),
        sequence_ids=columns[0], token_ids=columns[1], token_indexes=columns[2], ends=columns[3],
    )  # fmt: skip


def steps(tokens: list[int], sequence_id: int = 1, first: int = 0, end: int = END_LENGTH) -> list[Message]:
    """A step per token; the last one has ``end``."""
    last = len(tokens) - 1
    return [step((sequence_id, t, first + i, end if i == last else END_NONE)) for i, t in enumerate(tokens)]


class World:
    """The scheduler's and the executors' side of the bus, and what comes out of the detokenizer."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.written: dict[str, int] = {}
        self.seen: dict[str, EntryId] = {}

    async def write(self, stream: str, *messages: Message, epoch: int = 1) -> None:
        """Append to a log stream under the next indexes."""
        entries = []
        for message in messages:
            index = self.written[stream] = self.written.get(stream, 0) + 1
            entries.append(LogEntry(stream, EntryId(epoch, index), message))
        await self.bus.append(entries)

    async def executor(self, name: str) -> int:
        return await self.bus.acquire_lease("executor", name, {"state": "ready"}, ttl_s=60)

    async def next(self, stream: str) -> list[Message]:
        """The next messages of a stream, at least one."""
        entries: list[Entry] = []
        while not entries:
            entries = await self.bus.read({stream: self.seen.get(stream, START)}, block_ms=2000)
        self.seen[stream] = entries[-1].id
        return [entry.message for entry in entries if entry.message is not None]

    async def replies(self, ingress: str = "in-0") -> list[tuple[str, str, str | None, int]]:
        """(request, text, finish reason, output tokens) per row, until a terminal one has come."""
        rows: list[tuple[str, str, str | None, int]] = []
        while not any(row[2] for row in rows):
            for message in await self.next(NAMES.replies(ingress)):
                assert isinstance(message, ReplyBatch)
                columns = (message.request_ids, message.texts, message.finish_reasons)
                rows += [
                    (request_id, text, reason, int(n))
                    for request_id, text, reason, n in zip(*columns, message.num_output_tokens, strict=True)
                ]
        return rows


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(model=str(model_folder(tmp_path, byte_level())))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same actor, with shorter pauses."""
    monkeypatch.setattr(module, "TICK_S", 0.02)
    monkeypatch.setattr(module, "READ_BLOCK_MS", 20)


@asynccontextmanager
async def running(world: World, settings: Settings, name: str = "detok-0") -> AsyncIterator[DetokenizerActor]:
    """An actor that is ready; drained and ended at the end."""
    actor = DetokenizerActor(settings, MemoryBus(world.server), name)
    task = asyncio.create_task(actor.run())
    try:
        await until(lambda: actor.state == "ready")
        yield actor
    finally:
        actor.request_drain()
        await task


def joined(rows: list[tuple[str, str, str | None, int]]) -> tuple[str, str | None, int]:
    """(whole text, finish reason, tokens) of one sequence's rows; counts must grow."""
    counts = [row[3] for row in rows]
    assert sorted(set(counts)) == counts
    return "".join(row[1] for row in rows), rows[-1][2], counts[-1]


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


@pytest.mark.parametrize("when", ["before it is worked off", "afterwards"])
async def test_an_executor_goes_on_whose_end_the_bus_has_lost(world: World, settings: Settings, when: str) -> None:
    """It had been shut out. On a server that has forgotten that, it is taken back, and writes below what was read."""
    await world.executor("gpu-0")
    fence = LogEntry(NAMES.results("gpu-0"), EntryId(1, FENCE_INDEX), ReplicaFenced(replica="gpu-0", reason="gone"))
    async with running(world, settings) as actor:
        past, confirm_lease, lost = Past(world.server), actor.confirm_lease, asyncio.Event()
        await until(lambda: "gpu-0" in actor._positions)

        async def restart_once() -> None:
            await confirm_lease()
            if world.server.stream(NAMES.results("gpu-0")).ids and not lost.is_set():
                past.restore(world.server)
                actor.bus.on_restart()
                lost.set()

        if when == "before it is worked off":
            actor.confirm_lease = restart_once  # type: ignore[method-assign]
        await world.bus.append([fence])
        if when == "afterwards":
            await until(lambda: actor._positions["gpu-0"] == fence.id)
            await restart_once()
        await lost.wait()
        await world.write(NAMES.sequences("detok-0"), SchedulerLeads(epoch=2), started(), epoch=2)
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
        rows = await world.replies()
        await until(lambda: actor._positions["gpu-0"] == EntryId(1, len(TOKENS)))

    assert joined(rows) == (TEXT, "length", len(TOKENS))


async def test_results_that_are_read_again_after_a_restart_repeat_nothing(world: World, settings: Settings) -> None:
    """Nor is anything taken for lost because what came before it has been trimmed."""
    await world.executor("gpu-0")
    async with running(world, settings) as actor:
        half = len(TOKENS) // 2
        await world.write(NAMES.sequences("detok-0"), started())
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS[:half], end=END_NONE))
        await until(lambda: actor._positions.get("gpu-0") == EntryId(1, half))
        await world.bus.trim(NAMES.results("gpu-0"), EntryId(1, half - 2))
        actor.bus.on_restart()
        assert actor._positions == {"gpu-0": START}
        await until(lambda: actor._positions == {"gpu-0": EntryId(1, half)})
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS[half:], first=half))
        rows = await world.replies()

    assert joined(rows) == (TEXT, "length", len(TOKENS))


async def test_positions_are_reported_in_the_lease(world: World, settings: Settings) -> None:
    """The scheduler learns how far results were read."""
    await world.executor("gpu-0")
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), started())
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS))
        await world.replies()
        expected = {"results:gpu-0": f"1-{len(TOKENS)}"}
        info: Any = None
        while info != expected:
            info = (await world.bus.leases("detokenizer"))[0].info["positions"]
            await asyncio.sleep(0.01)


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


async def test_sequence_goes_on_after_its_replica_was_replaced(world: World, settings: Settings) -> None:
    """Repeated tokens are dropped, and the streams of both replicas may be read in any order."""
    for name in ("gpu-0", "gpu-1"):
        await world.executor(name)
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), started())
        half = len(TOKENS) // 2
        await world.write(NAMES.results("gpu-1"), *steps(TOKENS[:half], end=END_NONE))
        fence = LogEntry(NAMES.results("gpu-1"), EntryId(1, FENCE_INDEX), ReplicaFenced(replica="gpu-1", reason="gone"))
        await world.bus.append([fence])
        await world.write(NAMES.results("gpu-0"), *steps(TOKENS[half - 2 :], first=half - 2))
        rows = await world.replies()

    assert (TEXT, "length", len(TOKENS)) == joined(rows)


async def test_replica_that_joins_later_is_found(world: World, settings: Settings) -> None:
    """Its results are read from their beginning."""
    async with running(world, settings):
        await world.write(NAMES.sequences("detok-0"), started())
        await world.write(NAMES.results("gpu-7"), *steps(TOKENS))
        await world.executor("gpu-7")
        rows = await world.replies()

    assert (TEXT, "length", len(TOKENS)) == joined(rows)


async def test_fenced_replica_is_forgotten_once_its_lease_is_gone(world: World, settings: Settings) -> None:
    """Dead replicas do not pile up in the read set."""
    epoch = await world.executor("gpu-0")
    async with running(world, settings) as actor:
        await until(lambda: "results:gpu-0" in actor.lease_info()["positions"])
        await world.bus.release_lease("executor", "gpu-0", epoch)
        fence = LogEntry(NAMES.results("gpu-0"), EntryId(1, FENCE_INDEX), ReplicaFenced(replica="gpu-0", reason="gone"))
        await world.bus.append([fence])
        await until(lambda: not actor.lease_info()["positions"])


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


async def test_tokens_may_wait_for_earlier_ones_while_nothing_comes(
    world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nobody can say whether another replica has those."""
    await world.executor("gpu-0")
    async with running(world, settings) as actor:
        await until(lambda: "results:gpu-0" in actor.lease_info()["positions"])
        handled: list[list[Entry]] = []
        handle = actor._handle

        async def away(kind: str | None = None) -> NoReturn:
            raise BusUnavailable("away")

        async def record(entries: list[Entry], streams: Set[str], reached: dict[str, EntryId]) -> None:
            await handle(entries, streams, reached)
            handled.append(entries)

        with monkeypatch.context() as patch:
            patch.setattr(actor.bus, "leases", away)
            patch.setattr(actor, "_handle", record)
            await world.write(NAMES.sequences("detok-0"), started(1))
            await world.write(NAMES.results("gpu-0"), *steps(TOKENS[1:], first=1))
            await until(lambda: actor._sequences is not None and actor._sequences.waiting and handled[-1:] == [[]])
        await world.executor("gpu-1")
        await world.write(NAMES.results("gpu-1"), *steps(TOKENS[:1], end=END_NONE))
        rows = await world.replies()
    assert joined(rows) == (TEXT, "length", len(TOKENS))


async def test_tokens_of_a_replica_that_joins_during_a_read_are_not_lost(
    world: World, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come with the next read, though it is known by the time this one is worked off."""
    await world.executor("gpu-0")
    async with running(world, settings) as actor:
        await until(lambda: "results:gpu-0" in actor.lease_info()["positions"])
        read, reading = actor.bus.read, asyncio.Event()

        async def join_meanwhile(positions: Mapping[str, EntryId], **options: int) -> list[Entry]:
            reading.set()
            entries = await read(positions, **options)
            if any(entry.stream == NAMES.results("gpu-0") for entry in entries):
                await world.executor("gpu-1")
                await world.write(NAMES.results("gpu-1"), *steps(TOKENS[:1], end=END_NONE))
                await actor._discover()
            return entries

        monkeypatch.setattr(actor.bus, "read", join_meanwhile)
        await reading.wait()
        await world.write(NAMES.sequences("detok-0"), started(1))
        await world.write(
            NAMES.results("gpu-0"),
            step(
                *[
                    (1, token, 1 + i, END_LENGTH if i == len(TOKENS) - 2 else END_NONE)
                    for i, token in enumerate(TOKENS[1:])
                ]
            ),
        )
        rows = await world.replies()
    assert joined(rows) == (TEXT, "length", len(TOKENS))


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
