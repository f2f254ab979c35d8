"""What only the in-memory bus has: its clock, its switch, its sharing."""

from __future__ import annotations

import asyncio
import gc

import pytest

from pagebus.bus.connect import open_bus
from pagebus.bus.contract import COUNTERS_KEPT_S, START, BusError, BusUnavailable, Completion, Fenced
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import AbortRequest
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.bus.entries import GROUP, abort, publish, read_new


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_leases_expire_by_the_servers_clock() -> None:
    """An expired lease is gone, can be taken, and then fences its old holder."""
    clock = Clock()
    bus = MemoryBus(MemoryServer(clock))
    old = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=5)
    clock.now_s += 4
    await bus.renew_lease("scheduler", "leader", old, {}, ttl_s=5)
    clock.now_s += 4
    assert [lease.epoch for lease in await bus.leases()] == [old]
    clock.now_s += 1
    assert await bus.leases() == []
    new = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=5)
    assert new > old
    clock.now_s += 6
    with pytest.raises(Fenced):
        await bus.renew_lease("scheduler", "leader", old, {}, ttl_s=5)


async def test_expired_lease_nobody_took_is_taken_back() -> None:
    """A holder who slept goes on under the same epoch if nobody was there meanwhile."""
    clock = Clock()
    bus = MemoryBus(MemoryServer(clock))
    epoch = await bus.acquire_lease("executor", "e", {}, ttl_s=5)
    clock.now_s += 60
    await bus.renew_lease("executor", "e", epoch, {"state": "ready"}, ttl_s=5)
    assert [(lease.epoch, lease.info) for lease in await bus.leases()] == [(epoch, {"state": "ready"})]


async def test_state_expires() -> None:
    """State put with a time to live is gone after it."""
    clock = Clock()
    bus = MemoryBus(MemoryServer(clock))
    await bus.put_state("a", {"x": 1}, ttl_s=15)
    clock.now_s += 14
    assert await bus.get_state("a") == [{"x": 1}]
    clock.now_s += 1
    assert await bus.get_state("a") == [None]


async def test_expired_state_that_nobody_reads_takes_no_memory() -> None:
    """State under names that are used once would pile up. State that is put again lives as long as it said last."""
    clock = Clock()
    server = MemoryServer(clock)
    bus = MemoryBus(server)
    for name, ttl_s in (("once", 15.0), ("longer", 15.0), ("longer", 30.0), ("for ever", 15.0), ("for ever", None)):
        await bus.put_state(name, {}, ttl_s=ttl_s)
    clock.now_s += 20
    await bus.ping()
    assert len(server.states) == 2
    clock.now_s += 20
    await bus.ping()
    assert list(server.states) == [Names().state("for ever")]


async def test_counters_expire() -> None:
    """A while after the last change, by a completion or by hand, as in Redis."""
    clock = Clock()
    bus = MemoryBus(MemoryServer(clock))
    await bus.count({"short": {"a": 1}, "long": {"a": 1}}, ttl_s=15)
    clock.now_s += 10
    await bus.count({"long": {"a": 1, "b": 2}}, ttl_s=15)
    await publish(bus, "s", 1)
    completions = [Completion(each, "out", abort(1), "sums", "done") for each in await read_new(bus, "s")]
    assert await bus.complete(GROUP, completions) == [""]
    clock.now_s += 5
    assert await bus.counters("short", "long", "sums") == [{}, {"a": 2, "b": 2}, {"done": 1}]
    clock.now_s += COUNTERS_KEPT_S
    assert await bus.counters("short", "long", "sums") == [{}, {}, {}]


async def test_switched_off_server() -> None:
    """While the server is switched off every call raises BusUnavailable; nothing is lost."""
    server = MemoryServer()
    bus = MemoryBus(server)
    await bus.publish([("s", AbortRequest(request_id="1"))])
    server.unavailable = True
    with pytest.raises(BusUnavailable):
        await bus.publish([("s", AbortRequest(request_id="2"))])
    with pytest.raises(BusUnavailable):
        await bus.read({"s": START}, block_ms=0)
    server.unavailable = False
    assert len(await bus.read({"s": START}, block_ms=0)) == 1


async def test_only_interested_readers_are_woken() -> None:
    """An entry wakes those who wait for its stream and leaves nobody registered afterwards."""
    server = MemoryServer()
    bus = MemoryBus(server)
    first = asyncio.create_task(bus.read({"a": START}, block_ms=5000))
    second = asyncio.create_task(MemoryBus(server).read({"b": START}, block_ms=5000))
    await bus.ping()
    await bus.ping()
    await bus.publish([("a", AbortRequest(request_id="1"))])
    assert len(await first) == 1
    assert not second.done()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert server._waiting == {}


async def test_same_url_shares_a_server_and_deployments_do_not_meet() -> None:
    """Within a process memory:// is one server; its keys carry the deployment's name; it goes with its last user."""
    one, two, other = open_bus("memory://", "d"), open_bus("memory://", "d"), open_bus("memory://", "e")
    await one.put_state("a", {"x": 1})
    assert await two.get_state("a") == [{"x": 1}]
    assert await other.get_state("a") == [None]
    assert await open_bus("memory://x", "d").get_state("a") == [None]
    del one, two, other
    gc.collect()
    assert await open_bus("memory://", "d").get_state("a") == [None]


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:7000/2",
        "redis://user:p%40ss@localhost",
        "rediss://:secret@host:1?ssl_cert_reqs=none",
        "unix:///tmp/x.sock",
        "unix://user:secret@/tmp/x.sock?db=1",
        "redis+sentinel://:secret@a:1,b,[::1]:5/main/2?sentinel_password=x",
        "rediss+sentinel://a/main?ssl_cert_reqs=none",
    ],
)
def test_redis_urls_are_understood_and_hide_their_password(url: str) -> None:
    """Each scheme gives a RedisBus, which names its server without the password."""
    bus = open_bus(url)
    assert isinstance(bus, RedisBus)
    assert "secret" not in repr(bus._target)
    assert bus.names == Names("pagebus")


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("kafka://host", "unknown bus URL 'kafka'"),
        ("localhost:6379", "unknown bus URL"),
        ("redis://host:port", "cannot understand"),
        ("redis://host?no_such_option=1", "option that does not fit"),
        ("redis+sentinel://host", "needs Sentinels and a service"),
        ("redis+sentinel://host:x/main", "cannot understand"),
        ("unix://", "needs the path"),
        ("redis://host?replicas=²", "must be a number"),
    ],
)
def test_urls_that_cannot_be_understood(url: str, text: str) -> None:
    """A wrong URL is refused at once, saying what is wrong."""
    with pytest.raises(BusError, match=text):
        open_bus(url)
