"""The life of an actor, on a bus double that holds one lease."""

from __future__ import annotations

import asyncio

import pytest

from pagebus.actors.runtime.actor import metrics_state
from pagebus.bus.contract import Fenced
from tests.actors.runtime.lease_bus import LeaseBus, Waiter, begin, end, until_beat


async def test_life_in_order() -> None:
    """An actor starts, serves, drains, stops and gives its lease back, and its lease says so."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)
    await until_beat(bus)
    await end(actor, running)
    assert actor.steps == ["start", "serve", "drain", "stop"]
    assert bus.released == [7]
    assert actor.epoch == 7
    assert bus.said()[:2] == ["starting", "ready"]


async def test_says_once_that_it_is_ready() -> None:
    """Behind its start, before it serves, to whoever runs it."""
    actor = Waiter(LeaseBus())
    actor.when_ready(lambda: actor.steps.append("ready"))
    running = await begin(actor)
    await end(actor, running)
    assert actor.steps == ["start", "ready", "serve", "drain", "stop"]


async def test_standby_takes_over_when_the_lease_is_free() -> None:
    """While another holds the lease the actor waits, and does not start."""
    bus = LeaseBus()
    bus.taken = True
    actor = Waiter(bus)
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0)
    assert actor.steps == []
    bus.taken = False
    await actor.serving.wait()
    await end(actor, running)


async def test_standby_can_be_drained() -> None:
    """A standby told to drain ends without ever starting."""
    bus = LeaseBus()
    bus.taken = True
    actor = Waiter(bus)
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0)
    await end(actor, running)
    assert (actor.steps, bus.released) == ([], [])


async def test_bus_outage_does_not_end_an_actor() -> None:
    """Renewals go on failing while the bus is away, and succeed once it is back."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)
    bus.unavailable = True
    while bus.failed_renewals < 2:
        await until_beat(bus)
    bus.unavailable = False
    seen = len(bus.infos)
    while len(bus.infos) == seen:
        await until_beat(bus)
    assert not running.done()
    await end(actor, running)


@pytest.mark.parametrize(
    ("refusal", "told"), [("", "it does not answer"), ("OOM: out of memory", "OOM: out of memory")]
)
async def test_an_actor_knows_why_the_bus_takes_no_writes(refusal: str, told: str) -> None:
    """One failure may be a connection that was cut; after two it is said why, without an address, until it works."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)
    bus.unavailable, bus.refusal = True, refusal
    seen = []
    while bus.failed_renewals < 3:
        await until_beat(bus)
        seen.append(actor.bus_trouble)
    assert (seen[0], seen[-1]) == ("", told)
    bus.unavailable, bus.refusal = False, ""
    while actor.bus_trouble:
        await until_beat(bus)
        await asyncio.sleep(0)
    await end(actor, running)


async def test_fenced_actor_ends_with_that_error() -> None:
    """An actor whose lease belongs to somebody else ends at once."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)
    bus.fenced = True
    with pytest.raises(Fenced, match="newer holder"):
        await running
    assert actor.steps == ["start", "serve", "stop"]


async def test_failed_task_ends_the_actor() -> None:
    """An exception in a spawned task is the actor's end, and the task's error is the one raised."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)

    async def fail() -> None:
        raise RuntimeError("broken part")

    actor.spawn(fail(), "part")
    with pytest.raises(RuntimeError, match="broken part"):
        await running
    assert bus.released == [7]


async def test_finished_task_is_nothing_special() -> None:
    """A spawned task that returns leaves the actor running; its result can be awaited."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)

    async def three() -> int:
        return 3

    assert await actor.spawn(three(), "three") == 3
    assert not running.done()
    await end(actor, running)


async def test_failure_in_start() -> None:
    """An error while starting ends the actor, which gives its lease back."""

    class Broken(Waiter):
        async def start(self) -> None:
            raise ValueError("no model")

    bus = LeaseBus()
    actor = Broken(bus)
    with pytest.raises(ValueError, match="no model"):
        await actor.run()
    assert (actor.steps, bus.released) == (["stop"], [7])


async def test_drain_during_start() -> None:
    """An actor told to drain while it loads gives up loading."""

    class Slow(Waiter):
        async def start(self) -> None:
            self.serving.set()
            await asyncio.Event().wait()

    bus = LeaseBus()
    actor = Slow(bus)
    running = await begin(actor)
    await end(actor, running)
    assert actor.steps == ["stop"]


@pytest.mark.parametrize("stuck", ["serve", "drain"])
async def test_drain_has_a_limit(stuck: str) -> None:
    """A loop that does not come to rest, or cannot send what it has, is cut off after drain_timeout_s; no error."""

    async def wait_for_ever() -> None:
        actor.serving.set()
        await asyncio.Event().wait()

    actor = Waiter(LeaseBus(), drain_timeout_s=0.01)
    setattr(actor, stuck, wait_for_ever)
    running = await begin(actor)
    await end(actor, running)
    assert actor.steps == ["start", *(["serve"] if stuck == "drain" else []), "stop"]


async def test_spawned_tasks_end_with_the_actor() -> None:
    """Tasks still running when the actor stops are cancelled, after stop()."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)

    async def last() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            actor.steps.append("task cancelled")

    task = actor.spawn(last(), "last")
    await asyncio.sleep(0)
    await end(actor, running)
    assert task.cancelled()
    assert actor.steps[-2:] == ["stop", "task cancelled"]


async def test_metrics_are_published() -> None:
    """The snapshot of the actor's metrics lies on the bus under the actor's name."""
    bus = LeaseBus()
    actor = Waiter(bus)
    actor.metrics.counter("pagebus:things", "Things.").inc(3)
    running = await begin(actor)
    await until_beat(bus)
    series = bus.states[metrics_state("waiter", "w-0")]["series"]
    assert ["pagebus:things", {}, {"value": 3.0}] in series
    await end(actor, running)


async def test_cancelled_run_cleans_up() -> None:
    """Cancelling run() stops the actor and gives the lease back too."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (actor.steps, bus.released) == (["start", "serve", "stop"], [7])


async def test_an_actor_tells_what_its_process_takes() -> None:
    """CPU time and memory, by actor."""
    bus = LeaseBus()
    actor = Waiter(bus)
    running = await begin(actor)
    await until_beat(bus)
    await end(actor, running)
    series = {name: (labels, data) for name, labels, data in bus.states[metrics_state("waiter", "w-0")]["series"]}
    assert series["process_resident_memory_bytes"][0] == {"actor": "w-0"}
    assert series["process_resident_memory_bytes"][1]["value"] > 2**20
    assert series["process_cpu_seconds_total"][1]["value"] > 0
