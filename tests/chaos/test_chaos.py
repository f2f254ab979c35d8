"""Actors and Redis die, freeze and come back under 64 concurrent requests, and no client can tell. A third of the
requests is structured: schemas, expressions, grammars, calls of tools.

By default a short version runs; ``make chaos`` runs all of it (``PAGEBUS_TEST_CHAOS=full``) and shows what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.deployment import KINDS, Deployment, deployed
from tests.chaos.load import Load, make_jobs, silences
from tests.chaos.queued import Queued
from tests.chaos.servers import OneServer, Replicated
from tests.chaos.structured import structured

FULL = os.environ.get("PAGEBUS_TEST_CHAOS") == "full"
CLIENTS = 64
BEHIND_INGRESS = tuple(kind for kind in KINDS if kind != "ingress")
LEASE_S = 5.0
FROZEN_S = 10.0
"""Twice the time of a lease."""
BEFORE_S, AFTER_S = (3.0, 4.0) if FULL else (1.0, 1.0)
"""How long clients ask before the first fault, and once all is well again."""

pytestmark = pytest.mark.slow
full = pytest.mark.skipif(not FULL, reason="part of `make chaos` only")

Tell = Callable[..., None]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Tell:
    """Prints what was measured, under the test's name."""

    def say(**figures: object) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}:", ", ".join(f"{name} {value}" for name, value in figures.items()))

    return say if FULL else lambda **figures: None


def loaded(
    folder: Path, *arguments: str, servers: OneServer | Replicated | None = None
) -> Iterator[tuple[Deployment, Load]]:
    """A deployment and its clients; it must end well."""
    with deployed(folder, *arguments, servers=servers) as deployment:
        load = Load(deployment.url, structured(make_jobs(CLIENTS, seed=1, most_tokens=96)))
        yield deployment, load
        assert deployment.stop() == 0, deployment.log()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """One actor of each kind."""
    yield from loaded(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """Two of each kind."""
    kinds = ("executors", "schedulers", "tokenizers", "detokenizers", "ingresses")
    yield from loaded(tmp_path_factory.mktemp("double"), *(f"--{kind}=2" for kind in kinds))


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """One of each kind, with the shipped model. On a CPU the last bits of its logits depend on the size of the batch:
    log probabilities are not compared, the text is."""
    with deployed(tmp_path_factory.mktemp("shipped"), "--cpu-kv-cache-gib", "0.1", step_ms=0) as deployment:
        jobs = [job.without("logprobs", "top_logprobs") for job in make_jobs(CLIENTS, seed=1, most_tokens=96)]
        yield deployment, Load(deployment.url, structured(jobs))
        assert deployment.stop() == 0, deployment.log()


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """One of each kind, over a Redis that writes its file once a second, as ``pagebus serve`` configures it."""
    yield from loaded(tmp_path_factory.mktemp("on_disk"), servers=OneServer(fsync="everysec"))


@pytest.fixture(scope="module")
def own_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """One of each kind, over a Redis whose clock can jump."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make a clock with")
    yield from loaded(tmp_path_factory.mktemp("own_clock"), servers=OneServer(own_clock=True))


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Load]]:
    """One of each kind, over a master with a replica and a Sentinel."""
    yield from loaded(tmp_path_factory.mktemp("replicated"), servers=Replicated())


@contextlib.asynccontextmanager
async def busy(
    deployment: Deployment, load: Load, *, keyed: float = 0.5, patience_s: float = 60.0, queued: Queued | None = None
) -> AsyncIterator[None]:
    """Clients ask before, during and after what happens inside; all get their answers, and nothing is left. Jobs get
    theirs when nobody else is there."""
    if not load.expected:
        await load.learn()
    over = asyncio.Event()
    clients = asyncio.create_task(load.run(over, keyed=keyed, patience_s=patience_s))
    try:
        await asyncio.sleep(BEFORE_S)
        yield
        await asyncio.to_thread(deployment.until_healthy)
        await asyncio.sleep(AFTER_S)
    finally:
        over.set()
        await clients
    assert load.problems == []
    assert load.answers
    if queued is not None:
        await queued.collect(patience_s)
    assert await deployment.until_at_rest() == []


def measured(load: Load, fault_s: float) -> dict[str, Any]:
    """How long streams were silent after the fault."""
    found = silences(load.streams, fault_s)
    return {
        "answers": load.answers,
        "reconnects": load.reconnects,
        "streams under way": len(found),
        "median silence": f"{statistics.median(found):.2f} s" if found else "-",
        "longest": f"{found[-1]:.2f} s" if found else "-",
    }


# -- the short version -------------------------------------------------------------------------------------------------
async def test_each_actor_is_killed_in_turn(single: tuple[Deployment, Load]) -> None:
    """SIGKILL for every kind but the ingress, while clients without a key are there and jobs are queued: every client
    gets its answer, and every job."""
    deployment, load = single
    queued = Queued(deployment, load, 500)
    async with busy(deployment, load, queued=queued):
        await asyncio.to_thread(queued.push)
        for kind in BEHIND_INGRESS:
            deployment.kill(kind)
            await asyncio.sleep(3)


async def test_all_are_killed_at_once(single: tuple[Deployment, Load]) -> None:
    """SIGKILL for all five actors and Redis: clients with a key get the rest of their answers."""
    deployment, load = single
    async with busy(deployment, load, keyed=1):
        deployment.kill(*KINDS)
        deployment.kill_redis()
        await asyncio.to_thread(deployment.start_redis)


# -- the whole of it ---------------------------------------------------------------------------------------------------
@full
@pytest.mark.parametrize("kind", KINDS)
async def test_the_only_one_is_killed(single: tuple[Deployment, Load], kind: str, tell: Tell) -> None:
    """It is started again, and what it had under way goes on."""
    deployment, load = single
    async with busy(deployment, load, keyed=1 if kind == "ingress" else 0.5):
        fault_s = deployment.kill(kind)
    tell(**measured(load, fault_s), start=f"{deployment.last_start_s(kind):.2f} s")


@full
@pytest.mark.parametrize("kind", KINDS)
async def test_one_of_two_is_killed(double: tuple[Deployment, Load], kind: str, tell: Tell) -> None:
    """The other one takes over."""
    deployment, load = double
    async with busy(deployment, load, keyed=1 if kind == "ingress" else 0.5):
        fault_s = deployment.kill_one(kind)
    tell(**measured(load, fault_s))


@full
@pytest.mark.parametrize("kinds", [("scheduler", "executor"), ("scheduler", "detokenizer"), BEHIND_INGRESS])
async def test_several_are_killed_at_once(single: tuple[Deployment, Load], kinds: tuple[str, ...], tell: Tell) -> None:
    """Those who would help each other recover die together."""
    deployment, load = single
    async with busy(deployment, load):
        fault_s = deployment.kill(*kinds)
    tell(kinds="+".join(kinds), **measured(load, fault_s))


@full
@pytest.mark.parametrize("clients", ["with a key", "some without"])
async def test_random_actors_are_killed(single: tuple[Deployment, Load], clients: str, tell: Tell) -> None:
    """One every 2 s for 60 s; on a slow machine nobody may get an answer before that is over."""
    deployment, load = single
    rng = random.Random(5)
    keyed = clients == "with a key"
    async with busy(deployment, load, keyed=1 if keyed else 0.5, patience_s=150):
        for _ in range(30):
            deployment.kill(rng.choice(KINDS if keyed else BEHIND_INGRESS))
            await asyncio.sleep(2)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
async def test_random_actors_are_killed_with_the_shipped_model(shipped: tuple[Deployment, Load], tell: Tell) -> None:
    """One every 2 s for 60 s, the last of them the executor."""
    deployment, load = shipped
    rng = random.Random(6)
    async with busy(deployment, load, keyed=1, patience_s=200):
        for kind in (*rng.choices(KINDS, k=29), "executor"):
            deployment.kill(kind)
            await asyncio.sleep(2)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", ["one", "two"])
async def test_a_frozen_actor_comes_back(kind: str, number: str, request: pytest.FixtureRequest, tell: Tell) -> None:
    """SIGSTOP for twice the time of a lease, then SIGCONT: whether somebody took over or not, it does no harm."""
    deployment, load = request.getfixturevalue("single" if number == "one" else "double")
    async with busy(deployment, load, keyed=1 if kind == "ingress" else 0.5):
        process = deployment.of_kind(kind)[0]
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        process.send_signal(signal.SIGCONT)
    tell(answers=load.answers, reconnects=load.reconnects)


# -- Redis -------------------------------------------------------------------------------------------------------------
@full
async def test_redis_is_killed(single: tuple[Deployment, Load], tell: Tell) -> None:
    """Three times, with its append-only file."""
    deployment, load = single
    async with busy(deployment, load):
        for _ in range(3):
            deployment.kill_redis()
            await asyncio.to_thread(deployment.start_redis)
            await asyncio.sleep(3)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
@pytest.mark.parametrize("num_bytes", [(1, 20, 60), (100, 150, 200), (20_000,), (None,)])
async def test_redis_loses_what_it_had_stored(
    double: tuple[Deployment, Load], num_bytes: tuple[int | None, ...], tell: Tell
) -> None:
    """It is killed, and the end of its file cut off before it is started again; the last time, it starts empty. Nobody
    gets an error: what has been asked for is asked for again."""
    deployment, load = double
    assert isinstance(deployment.servers, OneServer)
    async with busy(deployment, load):
        for count in num_bytes:
            deployment.kill_redis()
            deployment.servers.forget(count)
            await asyncio.to_thread(deployment.start_redis)
            await asyncio.sleep(5)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
async def test_redis_is_away_for_longer_than_a_lease(single: tuple[Deployment, Load], tell: Tell) -> None:
    """All leases expire; nobody is given up for it."""
    deployment, load = single
    before = {name: child.pid for name, child in deployment.actors().items()}
    async with busy(deployment, load):
        deployment.kill_redis()
        await asyncio.sleep(LEASE_S + 2)
        await asyncio.to_thread(deployment.start_redis)
    assert {name: child.pid for name, child in deployment.actors().items()} == before
    tell(answers=load.answers, reconnects=load.reconnects)


@full
@pytest.mark.parametrize("pause_s", [3.0, 5.0, 8.0])
async def test_redis_pauses(single: tuple[Deployment, Load], pause_s: float, tell: Tell) -> None:
    """CLIENT PAUSE for less than, about and more than the time after which commands count as lost."""
    deployment, load = single
    before = {name: child.pid for name, child in deployment.actors().items()}
    async with busy(deployment, load):
        deployment.redis.execute_command("CLIENT", "PAUSE", int(pause_s * 1000))
        await asyncio.sleep(pause_s)
    assert {name: child.pid for name, child in deployment.actors().items()} == before
    tell(answers=load.answers, reconnects=load.reconnects)


@full
async def test_connections_to_redis_are_cut(single: tuple[Deployment, Load], tell: Tell) -> None:
    """All of them, twenty times in ten seconds."""
    deployment, load = single
    async with busy(deployment, load):
        for _ in range(20):
            deployment.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.5)
    tell(answers=load.answers, reconnects=load.reconnects)


@full
@pytest.mark.parametrize("trouble", ["out of memory", "disk full"])
async def test_redis_takes_no_writes(on_disk: tuple[Deployment, Load], trouble: str, tell: Tell) -> None:
    """For longer than a lease: new requests get a 503, /health says why, what was accepted goes on, nobody restarts."""
    deployment, load = on_disk
    before = {name: child.pid for name, child in deployment.actors().items()}
    async with busy(deployment, load):
        if trouble == "disk full":
            deployment.servers.server.fill_disk()
        else:
            deployment.redis.config_set("maxmemory", "1mb")
        await asyncio.sleep(LEASE_S + 3)
        status, told = await asyncio.to_thread(deployment.health)
        new = await asyncio.to_thread(deployment.new_request)
        if trouble == "disk full":
            deployment.servers.server.free_disk()
        else:
            deployment.redis.config_set("maxmemory", "0")
    assert (status, told["missing"]) == (503, ["bus"])
    assert ("MISCONF" if trouble == "disk full" else "maxmemory") in told["bus"]
    assert new == 503
    assert {name: child.pid for name, child in deployment.actors().items()} == before
    tell(answers=load.answers, reconnects=load.reconnects, bus=told["bus"])


@full
async def test_redis_freezes(single: tuple[Deployment, Load], tell: Tell) -> None:
    """SIGSTOP for 4, 5, 6 and 12 s: nobody restarts; after three seconds new requests get a 503."""
    deployment, load = single
    before = {name: child.pid for name, child in deployment.actors().items()}
    async with busy(deployment, load):
        for frozen_s in (4.0, 5.0, 6.0, 12.0):
            deployment.servers.server.send(signal.SIGSTOP)
            await asyncio.sleep(frozen_s - 0.5)
            status, told = await asyncio.to_thread(deployment.health)
            new = await asyncio.to_thread(deployment.new_request)
            deployment.servers.server.send(signal.SIGCONT)
            assert (status, told["missing"], new) == (503, ["bus"], 503)
            await asyncio.sleep(3)
    assert {name: child.pid for name, child in deployment.actors().items()} == before
    tell(answers=load.answers, reconnects=load.reconnects, refused=load.refused)


@full
async def test_redis_fails_over(replicated: tuple[Deployment, Load], tell: Tell) -> None:
    """The master is killed twice, Sentinel promotes the other: what was stored is there."""
    deployment, load = replicated
    before = {name: child.pid for name, child in deployment.actors().items()}
    without_s = []
    async with busy(deployment, load):
        for _ in range(2):
            without_s.append(await asyncio.to_thread(deployment.servers.fail_over))
            await asyncio.sleep(3)
    assert {name: child.pid for name, child in deployment.actors().items()} == before
    tell(answers=load.answers, seconds_without_a_master=[round(each, 2) for each in without_s])


@full
async def test_the_clock_of_redis_jumps(own_clock: tuple[Deployment, Load], tell: Tell) -> None:
    """An hour ahead, so that every lease expires at once, and back, so that nothing expires: nobody restarts."""
    deployment, load = own_clock
    before = {name: child.pid for name, child in deployment.actors().items()}
    async with busy(deployment, load):
        for offset_s in (3600, 0, -3600, 0):
            deployment.servers.set_clock(offset_s)
            assert deployment.redis.time()[0] - time.time() == pytest.approx(offset_s, abs=60)
            await asyncio.sleep(LEASE_S)
    assert {name: child.pid for name, child in deployment.actors().items()} == before
    tell(answers=load.answers, reconnects=load.reconnects)


@full
@pytest.mark.parametrize("kind", KINDS)
async def test_both_of_a_kind_are_restarted_in_turn(double: tuple[Deployment, Load], kind: str, tell: Tell) -> None:
    """SIGTERM: each finishes or hands over what it has, and is started again. (Whoever writes to a connection kept open
    just when the ingress closes it cannot know whether it was asked: such clients need a key.)"""
    deployment, load = double
    async with busy(deployment, load, keyed=1 if kind == "ingress" else 0.5):
        for name, process in deployment.actors().items():
            if name.startswith(f"{kind}-"):
                process.terminate()
                await asyncio.to_thread(process.wait, 60)
                await asyncio.to_thread(deployment.until_ready, name)
    tell(answers=load.answers, reconnects=load.reconnects, refused=load.refused)
