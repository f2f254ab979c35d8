"""A server that is started anew, with what it had stored, without the last of it, or without anything."""

from __future__ import annotations

import asyncio
import contextlib
import shutil

import pytest

from pagebus.bus.contract import START, BusUnavailable, EntryId, Fenced, LogEntry, ServerRolledBack
from pagebus.bus.messages import AbortRequest
from pagebus.bus.outbox import Outbox
from pagebus.bus.private_redis.server import PrivateRedis, find_redis_server
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH")
NAMES = Names("pagebus")
STREAM = NAMES.steps("gpu-0")


async def restart(server: PrivateRedis, *, lose: int | None = 0) -> None:
    """Kill it, and start it without the last ``lose`` bytes of its file (None: without the file)."""
    server.kill()
    await server.wait()
    (file,) = server.folder.glob("**/*.incr.aof")
    if lose is None:
        shutil.rmtree(file.parent)
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size - lose])
    await server.start()


async def read_when_back(bus: RedisBus) -> None:
    """A reader, who finds out first."""
    while True:
        try:
            await bus.read({STREAM: START}, block_ms=0)
        except BusUnavailable:
            await asyncio.sleep(0.01)
        else:
            return


async def test_a_restart_is_told_once(private_redis: PrivateRedis) -> None:
    """Not the first connection, no other one to the same server, not one that was lost on the way."""
    bus, told = RedisBus(private_redis.url, NAMES), []
    bus.tell_restarts(lambda: told.append(len(told)))
    await bus.connect()
    await bus.acquire_lease("scheduler", "leader", {}, ttl_s=60)
    bus._writer.drop()
    await read_when_back(bus)
    assert told == []
    for number in range(2):
        await restart(private_redis)
        await read_when_back(bus)
        await bus.ping()
        await bus.leases()
        assert told == [*range(number + 1)]
    await bus.close()


@pytest.mark.parametrize("first", ["a reader", "the writer"])
@pytest.mark.parametrize("lose", [0, 1, 200, None])
async def test_what_is_lost_is_noticed(private_redis: PrivateRedis, lose: int | None, first: str) -> None:
    """By whoever wrote it to a log stream, before it hides that by writing more, even if that is how it finds out.
    Trimmed entries are not lost, and queued ones not stored yet."""
    bus = RedisBus(private_redis.url, NAMES)
    outbox = Outbox(bus, epoch=3)
    bus.tell_restarts(outbox.bus_restarted)
    sending = asyncio.create_task(outbox.run())
    for number in range(20):
        outbox.append(STREAM, AbortRequest(request_id=f"request-{number}"))
    await outbox.flush()
    await bus.trim(STREAM, EntryId(3, 5))
    outbox.append(NAMES.journal, AbortRequest(request_id="the last write"))
    await outbox.flush()

    await restart(private_redis, lose=lose)
    if first == "a reader":
        await read_when_back(bus)
    with contextlib.suppress(BusUnavailable):  # it may have ended already
        for stream in (STREAM, NAMES.journal):
            outbox.append(stream, AbortRequest(request_id="what comes next"))
        await outbox.flush()
    if lose == 0:
        found = await bus.read(dict.fromkeys((STREAM, NAMES.journal), START))
        assert [entry.id.index for entry in found] == [*range(6, 22), 1, 2]
        sending.cancel()
        await asyncio.wait([sending])
    else:
        with pytest.raises(ServerRolledBack, match="the server has lost entries"):
            await sending
        found = await bus.read(dict.fromkeys((STREAM, NAMES.journal), START), block_ms=0)
        assert "what comes next" not in [getattr(entry.message, "request_id", "") for entry in found]
    await bus.close()


async def test_what_was_meant_for_one_server_is_not_written_to_another(private_redis: PrivateRedis) -> None:
    """Who was about to write hears of the other server first."""
    bus, told = RedisBus(private_redis.url, NAMES), []
    bus.tell_restarts(lambda: told.append(len(told)))
    await bus.put_state("of the first server", {})
    await restart(private_redis)
    with pytest.raises(BusUnavailable, match="started anew, or is another one"):
        await bus.put_state("late", {})
    assert told == [0]
    await bus.put_state("of the second server", {})
    found = await bus.get_state("of the first server", "late", "of the second server")
    assert found == [{}, None, {}]
    await bus.close()


async def test_epochs_go_on_after_everything_was_lost(private_redis: PrivateRedis) -> None:
    """Readers know positions of earlier epochs: later ones have to be larger."""
    bus = RedisBus(private_redis.url, NAMES)
    before = [await bus.acquire_lease("executor", f"gpu-{number}", {}, ttl_s=60) for number in range(3)]
    await bus.append([LogEntry(STREAM, EntryId(before[-1], 1), AbortRequest(request_id="a"))])
    await restart(private_redis, lose=None)
    await read_when_back(bus)
    assert await bus.last_id(STREAM) == START
    assert await bus.renew_lease("executor", "gpu-0", before[0], {}, ttl_s=60) is False
    after = await bus.acquire_lease("executor", "gpu-3", {}, ttl_s=60)
    assert [*before, after] == sorted({*before, after})
    await bus.close()


async def test_an_epoch_is_granted_once_though_its_grant_is_lost(private_redis: PrivateRedis) -> None:
    """Who held it before learns that somebody else has its lease."""
    bus = RedisBus(private_redis.url, NAMES)
    await bus.acquire_lease("executor", "gpu-0", {}, ttl_s=60)
    (file,) = private_redis.folder.glob("**/*.incr.aof")
    stored = file.stat().st_size
    before = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=60)
    await restart(private_redis, lose=file.stat().st_size - stored)
    await read_when_back(bus)
    after = await bus.acquire_lease("scheduler", "leader", {}, ttl_s=60)
    assert after > before
    with pytest.raises(Fenced, match=f"belongs to epoch {after} now, not to {before}"):
        await bus.renew_lease("scheduler", "leader", before, {}, ttl_s=60)
    await bus.close()
