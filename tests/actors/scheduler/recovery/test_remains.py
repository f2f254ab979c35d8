"""Streams of executors and detokenizers that are gone, whose names nobody has again."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.actors.scheduler.recovery import remains
from pagebus.actors.scheduler.recovery.remains import UNREAD_ROUNDS, VANISH_ROUNDS, Remains
from pagebus.actors.scheduler.service.detokenizers import Detokenizers
from pagebus.bus.contract import FENCE_INDEX, BusUnavailable, EntryId, LogEntry
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import SequenceEnded, StepPlan
from pagebus.bus.outbox import Outbox
from tests.actors.scheduler.served_scheduler import NAMES, TTL_S, Deployment, ask, done
from tests.helpers.waiting import until

OF_EXECUTOR = {NAMES.steps("gpu-a"), NAMES.results("gpu-a")}
OF_DETOKENIZER = {NAMES.sequences("text-a")}


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, planned_s=0.0, num_decodes=0)


class World:
    """The streams of one executor and one detokenizer, and who looks after them."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server, NAMES)
        self.outbox = Outbox(self.bus, 7)
        self.remains = Remains(self.bus, NAMES, self.outbox)

    async def fill(self) -> None:
        entries = [LogEntry(stream, EntryId(7, 1), plan(1)) for stream in OF_EXECUTOR | OF_DETOKENIZER]
        await self.bus.append(entries)
        await self.bus.trim(NAMES.results("gpu-a"), EntryId(7, 1))

    async def rounds(self, count: int) -> set[str]:
        """The streams there are after so many."""
        for _ in range(count):
            await self.remains.clear()
        return set(self.server.streams)


@pytest.fixture
async def world() -> World:
    made = World()
    await made.fill()
    for kind, name in (("executor", "gpu-a"), ("detokenizer", "text-a")):
        made.remains.here(kind, name)
    return made


async def test_streams_of_the_gone_are_deleted_after_a_while(world: World) -> None:
    """Not those of the living, and not at once: what was written for others may still be read."""
    world.remains.gone("detokenizer", "text-a")
    assert await world.rounds(VANISH_ROUNDS) == OF_EXECUTOR | OF_DETOKENIZER
    assert await world.rounds(1) == OF_EXECUTOR
    world.remains.gone("executor", "gpu-a")
    assert await world.rounds(VANISH_ROUNDS + 1) == set()


async def test_who_comes_back_keeps_his_streams(world: World) -> None:
    """An executor that is started again under its name."""
    world.remains.gone("executor", "gpu-a")
    await world.rounds(VANISH_ROUNDS)
    world.remains.here("executor", "gpu-a")
    assert await world.rounds(2 * VANISH_ROUNDS) >= OF_EXECUTOR


async def test_unread_results_stay_longer(world: World) -> None:
    """A detokenizer may be behind; one that stays behind is no reason to keep them for ever."""
    await world.bus.append([LogEntry(NAMES.results("gpu-a"), EntryId(7, 2), plan(2))])
    world.remains.gone("executor", "gpu-a")
    assert await world.rounds(UNREAD_ROUNDS) >= OF_EXECUTOR
    assert not OF_EXECUTOR & await world.rounds(1)


async def test_a_later_scheduler_knows_of_them(world: World) -> None:
    """Both end while there is no scheduler; the next one has never seen them."""
    await world.rounds(1)
    world.remains = Remains(world.bus, NAMES, world.outbox)
    await world.remains.recall()
    assert await world.rounds(VANISH_ROUNDS + 1) == set()


async def test_what_comes_back_with_a_server_goes_again(world: World) -> None:
    """It was set back to before the streams were deleted."""
    world.remains.gone("executor", "gpu-a")
    await world.rounds(VANISH_ROUNDS + 1)
    await world.fill()
    world.remains.bus_restarted()
    assert await world.rounds(VANISH_ROUNDS + 1) == OF_DETOKENIZER


async def test_deleted_streams_are_no_loss(world: World) -> None:
    """The server is started anew after a stream was deleted: nobody takes that for entries that it has lost."""
    sending = asyncio.create_task(world.outbox.run())
    world.outbox.append(NAMES.steps("gpu-a"), plan(1))
    await world.outbox.flush()
    world.remains.gone("executor", "gpu-a")
    await world.rounds(VANISH_ROUNDS + 1)
    world.outbox.bus_restarted()
    world.outbox.append(NAMES.steps("gpu-b"), plan(1))
    await world.outbox.flush()
    assert not sending.done()
    sending.cancel()
    await asyncio.wait([sending])


async def test_who_is_gone_is_told_nothing(world: World) -> None:
    """What was decided as it was lost has no reader; its next life hears of what comes after."""
    detokenizers = Detokenizers(NAMES, world.outbox)
    detokenizers.lead("text-a")
    detokenizers.lost("text-a")
    before = world.outbox.queued
    detokenizers.tell("text-a", SequenceEnded(sequence_id=1, reason="abort"))
    assert world.outbox.queued == before
    detokenizers.lead("text-a")
    detokenizers.tell("text-a", SequenceEnded(sequence_id=1, reason="abort"))
    assert world.outbox.queued == before + 2


def mentions(deployment: Deployment, replica: str) -> set[str]:
    """Where the scheduler, or the journal that it leaves, knows how far a replica's results are read; and its
    metrics."""
    actor, journal = deployment.scheduler, deployment.server.streams.get(NAMES.journal)
    found = {"results"} if replica in actor._leader._results.positions else set()
    found |= {"checkpoints"} if replica in actor._leader._checkpoints.covered else set()
    streams = actor._leader._trimmer._done.keys() | actor._leader._trimmer._read.keys()
    found |= {"trimmer"} if streams & OF_EXECUTOR or replica in actor._leader._trimmer._last_steps else set()
    found |= {"metrics" for _, labels, _ in actor.metrics.snapshot()["series"] if labels.get("engine") == replica}
    entries = [] if journal is None else journal.fields.values()
    return found | {"journal" for fields in entries if replica in str(fields)}


async def test_a_scheduler_clears_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor and a detokenizer of unique names work, and die: nothing is left of them, and others go on."""
    monkeypatch.setattr(remains, "VANISH_ROUNDS", 2)
    deployment = Deployment()
    async with deployment.running():
        epoch = await deployment.bus.acquire_lease("detokenizer", "text-a", {"state": "ready"}, ttl_s=TTL_S)
        await deployment.add_executor("gpu-a")
        await until(lambda: set(deployment.server.streams) >= OF_DETOKENIZER)
        await deployment.send(ask("one", max_tokens=4))
        await until(lambda: len(deployment.tokens()) == 4)
        await deployment.tell_positions()
        await deployment.send(done("one"))
        await deployment.stop_executor("gpu-a")
        await deployment.bus.release_lease("executor", "gpu-a", deployment.epochs["gpu-a"])
        await deployment.bus.release_lease("detokenizer", "text-a", epoch)
        deployment.positions["results:gpu-a"] = str(EntryId(deployment.epochs["gpu-a"], FENCE_INDEX))
        await deployment.tell_positions()
        await until(lambda: not (OF_EXECUTOR | OF_DETOKENIZER) & set(deployment.server.streams))
        await until(lambda: not mentions(deployment, "gpu-a"))
        await deployment.add_executor("gpu-b")
        await deployment.send(ask("two", max_tokens=4))
        await until(lambda: len(deployment.tokens()) == 8)
        assert NAMES.sequences("text") in deployment.server.streams
        await deployment.tell_positions()
        await deployment.send(done("two"))


async def test_a_successor_forgets_whom_it_has_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor died with the scheduler, whose journal speaks of it, and nothing else does."""
    monkeypatch.setattr(remains, "VANISH_ROUNDS", 2)
    deployment = Deployment()
    async with deployment.running():
        await deployment.add_executor("gpu-a")
        await deployment.send(ask("one", max_tokens=40))
        await until(lambda: len(deployment.tokens()) >= 4)
        await deployment.lose_scheduler()
        await deployment.stop_executor("gpu-a")
        await deployment.bus.release_lease("executor", "gpu-a", deployment.epochs["gpu-a"])
        await deployment.bus.put_state(remains.STATE, {})
        await deployment.start_scheduler()
        deployment.positions["results:gpu-a"] = str(EntryId(deployment.epochs["gpu-a"], FENCE_INDEX))
        await deployment.tell_positions()
        await until(lambda: not mentions(deployment, "gpu-a"))
        assert not OF_EXECUTOR & set(deployment.server.streams)
        await deployment.add_executor("gpu-b")
        await until(lambda: len(deployment.tokens()) >= 40)
        await deployment.tell_positions()
        await deployment.send(done("one"))


async def test_who_comes_back_during_a_round_keeps_his_streams(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor joins while a round waits for the bus because of another actor."""
    for kind, name in (("executor", "gpu-b"), ("executor", "gpu-a")):
        world.remains.gone(kind, name)
    await world.rounds(VANISH_ROUNDS)
    length = world.bus.length

    async def joins_meanwhile(stream: str) -> int:
        if stream == NAMES.results("gpu-b"):
            world.remains.here("executor", "gpu-a")
        return await length(stream)

    monkeypatch.setattr(world.bus, "length", joins_meanwhile)
    await world.rounds(1)
    monkeypatch.undo()
    assert await world.rounds(2 * VANISH_ROUNDS) >= OF_EXECUTOR


@pytest.mark.parametrize("returns", [False, True], ids=["gone", "back"])
async def test_streams_that_could_not_be_deleted_are_deleted_later(
    world: World, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    """The bus is away just then. Who comes back while it is asked keeps the streams."""

    async def is_away(*_: str) -> None:
        if returns:
            world.remains.here("detokenizer", "text-a")
        raise BusUnavailable("cut off")

    world.remains.gone("detokenizer", "text-a")
    await world.rounds(VANISH_ROUNDS)
    monkeypatch.setattr(world.bus, "delete", is_away)
    with pytest.raises(BusUnavailable):
        await world.rounds(1)
    monkeypatch.undo()
    left = await world.rounds(2 * VANISH_ROUNDS)
    assert left == (OF_EXECUTOR | OF_DETOKENIZER if returns else OF_EXECUTOR)
