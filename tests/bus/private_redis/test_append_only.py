"""Full disks and damaged files: the private server starts again, with all that can be saved, and says what is lost."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pagebus.bus.contract import BusUnavailable
from pagebus.bus.private_redis.append_only import AOF_FOLDER, parts_between_holes
from pagebus.bus.private_redis.server import PrivateRedis, find_redis_server
from pagebus.bus.redis.bus import RedisBus
from tests.helpers.waiting import until

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH")
SET = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$4\r\n\0\0\r\n\r\n"
TIME = b"#TS:1700000000\r\n"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateRedis]:
    """One that survives a file that may not grow."""
    made = PrivateRedis(tmp_path, before_exec=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
    await made.start()
    yield made
    await made.stop()


async def put(server: PrivateRedis, *names: str) -> None:
    bus = RedisBus(server.url)
    await bus.connect()
    for name in names:
        await bus.put_state(name, {"x": "y" * 100})
    await bus.close()


async def kept(server: PrivateRedis, *names: str) -> list[str]:
    """Those of the names that are there."""
    bus = RedisBus(server.url)
    await bus.connect()
    found = await bus.get_state(*names)
    await bus.close()
    return [name for name, value in zip(names, found, strict=True) if value is not None]


def written(server: PrivateRedis) -> Path:
    """The file that the server appends to."""
    (path,) = (server.folder / AOF_FOLDER).glob("*.incr.aof")
    return path


def may_grow(server: PrivateRedis, num_bytes: int) -> None:
    """As on a disk that has so much room (-1: enough)."""
    limit = resource.RLIM_INFINITY if num_bytes < 0 else written(server).stat().st_size + num_bytes
    assert server.pid is not None
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


async def rewritten(server: PrivateRedis, count: int) -> None:
    await until(lambda: server.log_path.read_text().count("AOF rewrite finished successfully") == count, look_s=0.05)


async def test_the_file_is_rewritten_after_a_full_disk(server: PrivateRedis) -> None:
    """A rewrite, a full disk, room again: what the file misses is repaired before anybody needs it."""
    await put(server, "before")
    assert (await server._ask("BGREWRITEAOF")).startswith(b"+")
    await rewritten(server, 1)
    await put(server, "between")
    await until(lambda: b"between" in written(server).read_bytes())
    may_grow(server, 50)
    refused = False
    with contextlib.suppress(TimeoutError):
        while not refused:
            try:
                await put(server, "full")
            except BusUnavailable:
                refused = True
    may_grow(server, -1)
    await rewritten(server, 2)
    await put(server, "after")
    await until(lambda: b"after" in written(server).read_bytes())
    assert b"\0" not in written(server).read_bytes()

    server.kill()
    await server.wait()
    await server.start()
    assert await kept(server, "before", "between", "full", "after") == ["before", "between", "full", "after"]


async def damaged(server: PrivateRedis, damage: bytes) -> int:
    """Kill the server and put something between two of its entries; returns how many bytes are behind it."""
    await put(server, "first")
    await until(lambda: b"first" in written(server).read_bytes())
    size = written(server).stat().st_size
    await put(server, "second")
    await until(lambda: b"second" in written(server).read_bytes())
    server.kill()
    await server.wait()
    data = written(server).read_bytes()
    written(server).write_bytes(data[:size] + damage + data[size:])
    return len(data) - size


async def test_a_hole_costs_nothing(server: PrivateRedis, caplog: pytest.LogCaptureFixture) -> None:
    """The server died before its file was rewritten: the zeros are taken out, the damaged file is kept."""
    await damaged(server, b"\0" * 4097)
    await server.start()
    assert await kept(server, "first", "second") == ["first", "second"]
    assert "4097 bytes of zeros were taken out" in caplog.text
    (copy,) = (server.folder / "damaged-1").iterdir()
    assert copy.read_bytes().count(b"\0" * 4097) == 1


async def test_what_is_behind_damage_is_cut_off(server: PrivateRedis, caplog: pytest.LogCaptureFixture) -> None:
    """Something else in the file: what comes before it is saved, and the log says how much is lost."""
    behind = await damaged(server, b"nonsense\r\n")
    await server.start()
    assert await kept(server, "first", "second") == ["first"]
    assert f"its last {behind + 10} bytes were cut off" in caplog.text
    assert (server.folder / "damaged-1" / AOF_FOLDER).is_dir()


async def test_what_cannot_be_repaired_is_set_aside(server: PrivateRedis, caplog: pytest.LogCaptureFixture) -> None:
    """The base of the file is no such file: the server begins anew, and says that all is lost."""
    await put(server, "first")
    server.kill()
    await server.wait()
    (base,) = (server.folder / AOF_FOLDER).glob("*.base.*")
    base.write_bytes(b"REDIS0010 this is none")
    await server.start()
    assert await kept(server, "first") == []
    assert "all that was stored is lost" in caplog.text
    await put(server, "later")
    assert await kept(server, "later") == ["later"]


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (SET + SET, [SET + SET]),
        (SET + b"\0\0\0" + SET, [SET, SET]),
        (b"\0" + SET + TIME + b"\0" * 9 + SET + b"\0", [SET + TIME, SET]),
        (SET + SET[:20], [SET + SET[:20]]),
        (SET + b"nonsense\0\0" + SET, [SET + b"nonsense\0\0" + SET]),
        (b"\0" * 5, []),
    ],
)
def test_only_zeros_between_commands_are_holes(data: bytes, parts: list[bytes]) -> None:
    """Those in an argument stay, and nothing behind what is no command is touched."""
    assert [data[start:end] for start, end in parts_between_holes(data)] == parts
