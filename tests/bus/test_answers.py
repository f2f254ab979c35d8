"""Answers that Redis refuses, or whose connection breaks: the others of the same call are stored, each once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagebus.bus.contract import COUNTERS_KEPT_S, BusUnavailable, Completion
from pagebus.bus.private_redis.server import PrivateRedis
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.redis.link import Command, RedisLink
from pagebus.bus.redis.stream import Reply
from pagebus.bus.redis.url import parse_redis_url
from tests.bus.entries import GROUP, abort, publish, read_new


async def test_what_is_refused_leaves_the_others(private_redis: PrivateRedis) -> None:
    """A key that is no stream, one that may not be written, and counters that are none."""
    raw, bus = RedisLink(parse_redis_url(private_redis.url), "test"), RedisBus(private_redis.url)
    await raw.call(("SET", "text", "x"))
    await raw.call(("ACL", "SETUSER", "default", "resetkeys", "~s*", "~out", "~text", "%R~readable"))
    await publish(bus, "s", *range(4))
    entries = await read_new(bus, "s")
    streams = ("out", "text", "readable", "out")
    completions = [
        Completion(entry, stream, abort(number), "text", "done")
        for number, (entry, stream) in enumerate(zip(entries, streams, strict=True))
    ]

    told = await bus.complete(GROUP, completions)

    assert [bool(problem) for problem in told] == [False, True, True, False]
    assert "WRONGTYPE" in told[1]
    assert "does not permit" in told[2]
    assert await bus.length("out") == 2
    assert await bus.consumers("s", GROUP) == {"a": 2}
    again = [Completion(each.entry, "out", each.message, "", "") for each in completions]
    assert await bus.complete(GROUP, again) == [""] * 4
    assert await bus.length("out") == 4
    await bus.close()
    await raw.close()


async def test_counters_expire(private_redis: PrivateRedis) -> None:
    """A while after the last completion; a key of another kind stays as it is."""
    raw, bus = RedisLink(parse_redis_url(private_redis.url), "test"), RedisBus(private_redis.url)
    await raw.call(("SET", "text", "x"))
    await publish(bus, "s", 0, 1)
    keys = ("sums", "text")
    entries = await read_new(bus, "s")
    completions = [Completion(each, "out", abort(0), key, "done") for each, key in zip(entries, keys, strict=True)]
    assert await bus.complete(GROUP, completions) == ["", ""]
    sums, text = await raw.call(*(("TTL", key) for key in keys))
    assert 0 < sums <= COUNTERS_KEPT_S
    assert text == -1
    await bus.close()
    await raw.close()


async def test_a_connection_that_breaks_between_the_looks(
    private_redis: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody watches any more what is answered meanwhile, so nothing is stored."""
    bus, other = RedisBus(private_redis.url), RedisBus(private_redis.url)
    await publish(bus, "s", 1)
    entries = await read_new(bus, "s")
    completions = [Completion(entries[0], "out", abort(1), "", "")]
    watch = bus._groups._transaction.watch

    async def watch_then_lose(keys: Sequence[str], *commands: Command) -> list[Reply]:
        replies = await watch(keys, *commands)
        bus._completion_link.drop()
        await other.complete(GROUP, completions)
        return replies

    monkeypatch.setattr(bus._groups._transaction, "watch", watch_then_lose)
    with pytest.raises(BusUnavailable, match="inside a transaction"):
        await bus.complete(GROUP, completions)
    assert await bus.length("out") == 1
    await bus.close()
    await other.close()
