"""What only RedisBus can meet: a server that goes away, hangs, refuses; foreign entries; commands cut off half-way."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pagebus.bus.contract import START, BusError, BusRefused, BusUnavailable, EntryId, Fenced, LeaseTaken, LogEntry
from pagebus.bus.messages import StepPlan
from pagebus.bus.private_redis.server import PrivateRedis
from pagebus.bus.redis.bus import RedisBus, _block_parts
from pagebus.bus.redis.link import Command, RedisLink
from pagebus.bus.redis.stream import Reply
from pagebus.bus.redis.url import with_password
from pagebus.bus.streams import Names
from tests.bus.entries import abort, request_ids
from tests.helpers.waiting import LIMIT_S


async def test_calls_fail_while_the_server_is_down_and_work_after(
    private_redis: PrivateRedis, server_bus: RedisBus
) -> None:
    """Every call says BusUnavailable, with the server's address, until the server is back, and once more;
    then all goes on."""
    await server_bus.publish([("s", abort(1))])
    reading = asyncio.create_task(server_bus.read({"l": START}, block_ms=60_000))
    group_reading = asyncio.create_task(server_bus.read_group("g", "a", ["t"], block_ms=60_000))
    await server_bus.ping()
    private_redis.kill()
    await private_redis.wait()
    for task in (reading, group_reading):
        with pytest.raises(BusUnavailable, match=private_redis.url):
            await task
    for call in (
        server_bus.ping(),
        server_bus.publish([("s", abort(2))]),
        server_bus.read({"s": START}, block_ms=0),
        server_bus.leases(),
    ):
        with pytest.raises(BusUnavailable, match="is it running"):
            await call
    await private_redis.start()
    with pytest.raises(BusUnavailable, match="has been started anew"):
        await server_bus.ping()
    assert request_ids(await server_bus.read({"s": START}, block_ms=0)) == ["r1"]
    assert request_ids(await server_bus.read_group("g", "a", ["s"], block_ms=0)) == ["r1"]
    assert await server_bus.leases() == []


async def test_connect_waits_for_the_server(private_redis: PrivateRedis) -> None:
    """connect() keeps trying while the server is not there yet."""
    await private_redis.stop()
    bus = RedisBus(private_redis.url, connect_timeout_s=LIMIT_S)
    connecting = asyncio.create_task(bus.connect())
    await asyncio.sleep(0)
    await private_redis.start()
    await connecting
    await bus.close()


async def test_connect_gives_up_in_the_end(private_redis: PrivateRedis) -> None:
    """Without a server connect() ends with a clear error."""
    await private_redis.stop()
    bus = RedisBus(private_redis.url, connect_timeout_s=0.0)
    with pytest.raises(BusUnavailable, match="no connection to Redis"):
        await bus.connect()
    await bus.close()


async def test_hung_server_is_noticed(private_redis: PrivateRedis, server_bus: RedisBus) -> None:
    """A stopped server counts as unavailable after the timeout, and is used again once it answers."""
    pid = private_redis.pid
    assert pid is not None
    hasty = RedisBus(private_redis.url, connect_timeout_s=LIMIT_S, command_timeout_s=0.5)
    await hasty.connect()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(BusUnavailable, match="does not answer"):
            await hasty.append([LogEntry("l", EntryId(1, 1), StepPlan(step=1, planned_s=0.0, num_decodes=0))])
    finally:
        os.kill(pid, signal.SIGCONT)
    # It may or may not have been applied: the repeat is recognised.
    await server_bus.append([LogEntry("l", EntryId(1, 1), StepPlan(step=1, planned_s=0.0, num_decodes=0))])
    assert await server_bus.length("l") == 1
    await hasty.close()


async def test_idle_connection_closed_by_the_server(server_bus: RedisBus, raw: RedisLink) -> None:
    """A connection that the server closed while idle is replaced without an error."""
    await server_bus.ping()
    await raw.call(("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
    await raw.call(("PING",))
    await asyncio.sleep(0)
    assert await server_bus.length("s") == 0


@pytest.mark.parametrize(
    ("setup", "undo", "text"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "maxmemory"),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "READONLY"),
        (
            ("CONFIG", "SET", "min-replicas-to-write", "1"),
            ("CONFIG", "SET", "min-replicas-to-write", "0"),
            "NOREPLICAS",
        ),
    ],
)
async def test_refused_writes_may_pass(
    server_bus: RedisBus, raw: RedisLink, setup: Command, undo: Command, text: str
) -> None:
    """A server that refuses writes for now is BusUnavailable with its reason; later writes work."""
    await raw.call(setup)
    with pytest.raises(BusUnavailable, match=text):
        await server_bus.publish([("s", abort(1))])
    with pytest.raises(BusUnavailable, match=text):
        await server_bus.acquire_lease("k", "n", {}, ttl_s=5)
    await raw.call(undo)
    await server_bus.publish([("s", abort(1))])
    assert await server_bus.length("s") == 1


async def test_of_refused_writes_none_is_taken(server_bus: RedisBus, raw: RedisLink) -> None:
    """A batch of which the first entry alone is refused would be repeated out of order."""
    await raw.call(("CONFIG", "SET", "maxmemory", "1"))
    with pytest.raises(BusRefused, match="maxmemory"):
        await server_bus.publish([("t", abort(1)), ("t", abort(2))])
    plans = [StepPlan(step=step, planned_s=0.0, num_decodes=0) for step in (1, 2)]
    with pytest.raises(BusRefused, match="maxmemory"):
        await server_bus.append([LogEntry("l", EntryId(1, plan.step), plan) for plan in plans])
    await raw.call(("CONFIG", "SET", "maxmemory", "0"))
    assert [await server_bus.length(stream) for stream in ("t", "l")] == [0, 0]
    await server_bus.append([LogEntry("l", EntryId(1, plan.step), plan) for plan in plans])
    assert [entry.id.index for entry in await server_bus.read({"l": START}, block_ms=0)] == [1, 2]


async def test_wrong_kind_of_key_is_an_error_not_an_outage(server_bus: RedisBus, raw: RedisLink) -> None:
    """A key that is no stream is a plain BusError: waiting would not help."""
    await raw.call(("SET", "s", "x"))
    with pytest.raises(BusError, match="WRONGTYPE") as caught:
        await server_bus.publish([("s", abort(1))])
    assert not isinstance(caught.value, BusUnavailable)


async def test_credentials(private_redis: PrivateRedis, server_bus: RedisBus, raw: RedisLink) -> None:
    """User and password of the URL are used; wrong or missing ones are named at once, without the password."""
    await raw.call(
        ("ACL", "SETUSER", "worker", "on", ">s3cret%", "~*", "&*", "+@all"), ("CONFIG", "SET", "requirepass", "p")
    )
    path = private_redis.url.removeprefix("unix://")
    for url in (f"unix://worker:s3cret%25@{path}", with_password(f"unix://worker@{path}", "s3cret%")):
        bus = RedisBus(url)
        await bus.connect()
        await bus.close()
    for userinfo in ("", "worker:wr0ng@"):
        bad = RedisBus(f"unix://{userinfo}{path}", connect_timeout_s=LIMIT_S)
        with pytest.raises(BusError, match=r"refuses our credentials|NOAUTH") as caught:
            await bad.connect()
        assert "wr0ng" not in str(caught.value)
        await bad.close()


async def test_a_database_that_is_not_there(private_redis: PrivateRedis) -> None:
    """It is named at once: waiting helps as little as with a wrong password."""
    bad = RedisBus(f"{private_redis.url}?db=99", connect_timeout_s=LIMIT_S)
    with pytest.raises(BusError, match="no such database"):
        await bad.connect()
    await bad.close()


async def test_foreign_entry_is_given_with_its_error(server_bus: RedisBus, raw: RedisLink) -> None:
    """An entry that is no frame of ours is handed out undecoded, with the reason, and can be dead-lettered."""
    await raw.call(("XADD", "s", "*", "hello", "world"))
    (entry,) = await server_bus.read_group("g", "a", ["s"], block_ms=0)
    assert entry.message is None
    assert "field 'h' is missing" in entry.error
    assert entry.raw == {b"hello": b"world"}
    await server_bus.dead_letter("stage", entry, "")
    await server_bus.ack("g", [entry])
    (kept,) = await server_bus.read({server_bus.names.dead_letters("stage"): START}, block_ms=0)
    assert kept.raw is not None
    assert kept.raw[b"hello"] == b"world"
    assert b"is missing" in kept.raw[b"dead.reason"]


async def test_expired_lease(server_bus: RedisBus, raw: RedisLink) -> None:
    """An expired lease leaves the index; its holder takes it back, unless somebody was there meanwhile."""
    names = server_bus.names
    epoch = await server_bus.acquire_lease("executor", "e", {}, ttl_s=1000)
    (left_ms,) = await raw.call(("PTTL", names.lease("executor", "e")))
    assert 990_000 < left_ms <= 1_000_000
    await raw.call(("DEL", names.lease("executor", "e")))  # what expiry does
    assert await server_bus.leases() == []
    assert (await raw.call(("SMEMBERS", names.leases))) == [[]]
    await server_bus.renew_lease("executor", "e", epoch, {"state": "ready"}, ttl_s=1000)
    assert [lease.epoch for lease in await server_bus.leases()] == [epoch]
    await raw.call(("DEL", names.lease("executor", "e")))
    newer = await server_bus.acquire_lease("executor", "e", {}, ttl_s=1000)
    await raw.call(("DEL", names.lease("executor", "e")))
    with pytest.raises(Fenced, match=f"epoch {newer}"):
        await server_bus.renew_lease("executor", "e", epoch, {}, ttl_s=1000)


async def test_lease_that_changes_under_a_transaction(server_bus: RedisBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease taken between looking and taking is not taken twice; a lost connection does not run half of it."""
    other = RedisBus(server_bus._target.text)
    leases = server_bus._leases
    look = leases._watch_lease
    meddle = True

    async def look_then_meddle(*keys: str) -> list[Reply]:
        nonlocal meddle
        values = await look(*keys)
        if meddle:
            meddle = False
            await other.acquire_lease("k", "n", {}, ttl_s=1000)
        return values

    monkeypatch.setattr(leases, "_watch_lease", look_then_meddle)
    with pytest.raises(LeaseTaken):
        await server_bus.acquire_lease("k", "n", {}, ttl_s=1000)

    async def look_then_lose(*keys: str) -> list[Reply]:
        values = await look(*keys)
        server_bus._lease_link.drop()
        return values

    monkeypatch.setattr(leases, "_watch_lease", look_then_lose)
    with pytest.raises(BusUnavailable, match="inside a transaction"):
        await server_bus.acquire_lease("k", "m", {}, ttl_s=1000)
    monkeypatch.setattr(leases, "_watch_lease", look)
    assert [lease.name for lease in await server_bus.leases()] == ["n"]
    await other.close()


async def test_claim_from_a_consumer_that_wakes_up(server_bus: RedisBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dead one reads just before it is removed is claimed too: no entry is stranded."""
    await server_bus.publish([("s", abort(number)) for number in range(3)])
    zombie = RedisBus(server_bus._target.text)
    assert len(await zombie.read_group("g", "dead", ["s"], count=2, block_ms=0)) == 2
    call = server_bus._writer.call

    async def call_after_zombie(*commands: Command, generation: int | None = None) -> list[Reply]:
        if commands[0] == ("MULTI",):
            assert request_ids(await zombie.read_group("g", "dead", ["s"], count=2, block_ms=0)) == ["r2"]
        return await call(*commands, generation=generation)

    monkeypatch.setattr(server_bus._writer, "call", call_after_zombie)
    assert request_ids(await server_bus.claim("s", "g", "alive", "dead")) == ["r0", "r1", "r2"]
    assert await server_bus.consumers("s", "g") == {"alive": 3}
    await zombie.close()


async def test_cancelled_calls_never_mix_replies(redis_url: str, redis_names: Names) -> None:
    """Cancelling callers at random leaves every other caller with its own answer."""
    bus = RedisBus(redis_url, redis_names)
    for number in range(10):
        await bus.put_state(f"n{number}", {"number": number})

    async def look(number: int) -> None:
        assert await bus.get_state(f"n{number}") == [{"number": number}]

    for round_number in range(30):
        tasks = [asyncio.create_task(look(number)) for number in range(10)]
        for _ in range(round_number % 5):
            await asyncio.sleep(0)
        for task in tasks[:: 2 + round_number % 3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
    assert bus._writer.generation == 1
    await bus.close()


async def test_cancelling_reads_often_does_not_pile_up_connections(redis_url: str, redis_names: Names) -> None:
    """A read that is begun and cancelled again and again uses one or two connections, and still gets its entry."""
    bus = RedisBus(redis_url, redis_names)
    stream = redis_names.replies("i")
    for _ in range(50):
        for reading in (
            asyncio.create_task(bus.read({stream: START}, block_ms=2000)),
            asyncio.create_task(bus.read_group("g", "a", [redis_names.control], block_ms=2000)),
        ):
            await bus.ping()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    assert len(bus._readers) <= 4
    await bus.publish([(stream, abort(1)), (redis_names.control, abort(2))])
    assert request_ids(await bus.read({stream: START}, block_ms=2000)) == ["r1"]
    assert request_ids(await bus.read_group("g", "a", [redis_names.control], block_ms=2000)) == ["r2"]
    await bus.close()


async def test_concurrent_calls_share_round_trips(redis_url: str, redis_names: Names) -> None:
    """Calls made together keep their order and each gets its own replies."""
    bus = RedisBus(redis_url, redis_names)
    stream = redis_names.replies("i")
    await asyncio.gather(*(bus.publish([(stream, abort(number))]) for number in range(200)))
    assert request_ids(await bus.read({stream: START}, count=500, block_ms=0)) == [
        f"r{number}" for number in range(200)
    ]
    await bus.close()


async def test_writes_are_sent_when_they_are_called(redis_url: str, redis_names: Names) -> None:
    """Before anybody waits for their answers."""
    bus, other = RedisBus(redis_url, redis_names), RedisBus(redis_url, redis_names)
    await bus.ping()
    entry = LogEntry(redis_names.steps("e"), EntryId(1, 1), StepPlan(step=1, planned_s=0.0, num_decodes=0))
    answers = [bus.append([entry]), bus.publish([(redis_names.replies("i"), abort(number)) for number in (1, 2)])]
    assert [each.id for each in await other.read({entry.stream: START}, block_ms=2000)] == [entry.id]
    assert request_ids(await other.read({redis_names.replies("i"): START}, block_ms=2000)) == ["r1", "r2"]
    await asyncio.gather(*answers)
    await asyncio.gather(bus.publish([]), bus.append([]))
    await bus.close()
    await other.close()


def test_long_waits_are_cut() -> None:
    """No BLOCK is longer than two seconds."""
    assert _block_parts(0) == [0]
    assert _block_parts(1500) == [1500]
    assert _block_parts(4000) == [2000, 2000]
    assert _block_parts(5001) == [2000, 2000, 1001]


async def test_old_servers_are_refused(redis_url: str) -> None:
    """A server older than 7.0 is refused with its version."""
    bus = RedisBus(redis_url)
    with pytest.raises(BusError, match=r"version 6\.2\.7"):
        bus._check_server({"redis_version": "6.2.7", "maxmemory": "0"})
    bus._check_server({"redis_version": "7.0.15"})
    bus._check_server({"redis_version": "8.6.3", "maxmemory": "100", "maxmemory_policy": "allkeys-lru"})
    bus._check_server({})
    await bus.close()


async def test_what_a_lost_connection_was_given_is_found(
    server_bus: RedisBus, raw: RedisLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may hand entries to a read of ours that we have given up, after we looked for such entries."""
    stream = server_bus.names.tokenized
    await server_bus.create_group(stream, "g")
    assert await server_bus.read_group("g", "c", [stream], block_ms=0) == []
    await server_bus.publish([(stream, abort(1)), (stream, abort(2))])
    await raw.call(("XREADGROUP", "GROUP", "g", "c", "COUNT", 1, "STREAMS", stream, ">"))
    (second,) = await server_bus.read_group("g", "c", [stream], block_ms=0)
    assert second.message == abort(2)
    monkeypatch.setattr("pagebus.bus.redis.groups.LOOK_AGAIN_S", 0.0)
    (first,) = await server_bus.read_group("g", "c", [stream], block_ms=0)
    assert (first.message, first.deliveries) == (abort(1), 1)
