"""The private server: start, crash, data that stays, and errors that say what is wrong."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pagebus.bus.contract import START, BusError, BusUnavailable, EntryId, LogEntry
from pagebus.bus.messages import AbortRequest, StepPlan
from pagebus.bus.private_redis.server import PrivateRedis, find_redis_server
from pagebus.bus.redis.bus import RedisBus

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH")


async def test_killed_server_keeps_its_entries(private_redis: PrivateRedis) -> None:
    """After kill -9 and a new start on the same folder, streams, groups, last ids and epochs are there."""
    bus = RedisBus(private_redis.url)
    await bus.connect()
    await bus.publish([("s", AbortRequest(request_id=str(number))) for number in range(50)])
    handed_out = await bus.read_group("g", "a", ["s"], count=20, block_ms=0)
    await bus.append([LogEntry("l", EntryId(4, 7), StepPlan(step=7, planned_s=0.0, num_decodes=0))])
    await bus.trim("l", EntryId(4, 7))
    epoch = await bus.acquire_lease("executor", "e", {}, ttl_s=1000)
    await bus.ack("g", handed_out[:5])

    private_redis.kill()
    assert await private_redis.wait() != 0
    assert private_redis.pid is None
    await private_redis.start()

    again = RedisBus(private_redis.url)
    await again.connect()
    assert await again.length("s") == 45
    assert len(await again.read_group("g", "a", ["s"], block_ms=0)) == 15
    assert len(await again.read_group("g", "a", ["s"], block_ms=0)) == 30
    assert await again.last_id("l") == EntryId(4, 7)
    assert [lease.epoch for lease in await again.leases()] == [epoch]
    assert await again.acquire_lease("executor", "other", {}, ttl_s=1000) > epoch
    # The first bus says that it was started anew, goes on, and does not hand out twice what it already gave.
    with pytest.raises(BusUnavailable, match="has been started anew"):
        await bus.length("s")
    assert await bus.length("s") == 45
    assert await bus.read({"l": START}, block_ms=0) == []
    await bus.close()
    await again.close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_folder_and_socket_are_private(private_redis: PrivateRedis) -> None:
    """Nobody else may enter the folder or use the socket, and there is no TCP port."""
    assert mode(private_redis.folder) == 0o700
    assert mode(Path(private_redis.url.removeprefix("unix://"))) == 0o700
    assert "port 0\n" in (private_redis.folder / "redis.conf").read_text()
    assert private_redis.log_path.stat().st_size > 0


async def test_long_and_odd_paths_work(tmp_path: Path) -> None:
    """A folder whose path is too long for a socket, or has spaces, works; stop removes the socket."""
    server = PrivateRedis(tmp_path / 'a folder with a "quote"' / ("x" * 100))
    url = await server.start()
    assert await server.start() == url
    bus = RedisBus(url)
    await bus.connect()
    await bus.put_state("a", {"x": 1})
    await bus.close()
    await server.stop()
    await server.stop()
    assert not Path(url.removeprefix("unix://")).parent.exists()
    bus = RedisBus(await server.start())
    assert await bus.get_state("a") == [{"x": 1}]
    await bus.close()
    await server.stop()


async def test_temporary_folder_goes_with_the_server() -> None:
    """Without a folder the server uses a temporary one and removes it."""
    server = PrivateRedis(None)
    await server.start()
    assert server.folder.exists()
    await server.stop()
    assert not server.folder.exists()


async def test_server_that_dies_says_why(tmp_path: Path) -> None:
    """A server that cannot start is reported with the end of its log."""
    (tmp_path / "appendonlydir").write_text("in the way")
    server = PrivateRedis(tmp_path)
    with pytest.raises(BusError, match="ended with status"):
        await server.start()
    await server.stop()


async def test_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a redis-server on PATH the remedy is named."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BusError, match="no redis-server found on PATH"):
        await PrivateRedis(tmp_path).start()
