"""The detokenizer actor reads the results of replicas that come, go, are replaced, or that the bus has lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set
from typing import Any, NoReturn

import pytest

from pagebus.actors.settings import Settings
from pagebus.bus.contract import FENCE_INDEX, START, BusUnavailable, Entry, EntryId, LogEntry
from pagebus.bus.messages import (
    END_LENGTH,
    END_NONE,
    ReplicaFenced,
    SchedulerLeads,
)
from tests.actors.detokenizer.world import NAMES, TEXT, TOKENS, World, joined, running, started, step, steps
from tests.dst.past import Past
from tests.helpers.waiting import until


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
