"""Leases and small state in Redis.

A lease is a key that expires, with its holder's epoch in the value. Epochs come from one counter that is never behind
the time in milliseconds. A later holder therefore has a larger epoch than every earlier one, even on a server that has
lost all or some of its data. All changes are WATCH transactions.

Beside each lease, a key that lives for a day stores the last epoch it was granted under. A holder that slept through
its expiry thereby learns that the lease has had another holder. If a server has lost a grant and a lease has two
holders, the later one keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from pagebus.bus.codec import decode_state, encode_state
from pagebus.bus.contract import BusUnavailable, CodecError, Fenced, LeaseInfo, LeaseTaken
from pagebus.bus.messages import JsonValue
from pagebus.bus.redis.link import Command, RedisLink
from pagebus.bus.redis.replies import checked, exec_results, pairs
from pagebus.bus.redis.stream import Reply
from pagebus.bus.redis.transaction import RedisTransaction
from pagebus.bus.streams import Names

_GRANT_MS = 24 * 3600 * 1000
_TRIES = 16


def to_ms(seconds: float) -> int:
    """A time to live in whole milliseconds, at least 1."""
    return max(1, round(seconds * 1000))


class RedisLeases:
    """The lease part of the bus, on a connection of its own."""

    def __init__(self, link: RedisLink, names: Names) -> None:
        self._link = link
        self._transaction = RedisTransaction(link)
        self._names = names

    async def acquire(self, kind: str, name: str, info: Mapping[str, JsonValue], *, ttl_s: float) -> int:
        """See :meth:`pagebus.bus.contract.Bus.acquire_lease`."""
        key, granted = self._keys(kind, name)
        counter = self._names.epochs
        async with self._transaction.lock:
            for _ in range(_TRIES):
                held, last = await self._watch_lease(key, counter)
                if held is not None:
                    raise LeaseTaken(f"{kind} {name!r} is already running (epoch {_parse(held)[0]})")
                epoch = _after(last)
                if await self._exec([("SET", counter, epoch), *self._set_commands(key, granted, epoch, info, ttl_s)]):
                    return epoch
        raise LeaseTaken(f"{kind} {name!r} is being taken by others")

    async def renew(self, kind: str, name: str, epoch: int, info: Mapping[str, JsonValue], *, ttl_s: float) -> bool:
        """See :meth:`pagebus.bus.contract.Bus.renew_lease`."""
        key, granted = self._keys(kind, name)
        async with self._transaction.lock:
            for _ in range(_TRIES):
                held, last = await self._watch_lease(key, granted)
                holder = _parse(held)[0] if held is not None else int(last) if last is not None else epoch
                if holder > epoch:
                    raise Fenced(f"the lease of {kind} {name!r} belongs to epoch {holder} now, not to {epoch}")
                if await self._exec(self._set_commands(key, granted, epoch, info, ttl_s)):
                    return held is not None and holder == epoch
        raise BusUnavailable(f"the lease of {kind} {name!r} could not be renewed: it changes all the time")

    async def release(self, kind: str, name: str, epoch: int) -> None:
        """See :meth:`pagebus.bus.contract.Bus.release_lease`."""
        key, _ = self._keys(kind, name)
        async with self._transaction.lock:
            for _ in range(_TRIES):
                (held,) = await self._watch_lease(key)
                if held is None or _parse(held)[0] != epoch:
                    return
                if await self._exec([("DEL", key), ("SREM", self._names.leases, key)]):
                    return

    async def revoke(self, kind: str, name: str, below: int) -> int:
        """See :meth:`pagebus.bus.contract.Bus.revoke_lease`."""
        key, granted = self._keys(kind, name)
        counter = self._names.epochs
        async with self._transaction.lock:
            for _ in range(_TRIES):
                held, last = await self._watch_lease(key, counter)
                if held is not None and _parse(held)[0] >= below:
                    return 0
                epoch = _after(last)
                grant: Command = ("SET", granted, str(epoch), "PX", _GRANT_MS)
                forget: list[Command] = [("DEL", key), ("SREM", self._names.leases, key)]
                if await self._exec([("SET", counter, epoch), grant, *forget]):
                    return epoch
        return 0

    async def live(self, kind: str | None) -> list[LeaseInfo]:
        """See :meth:`pagebus.bus.contract.Bus.leases`."""
        (reply,) = await self._link.call(("SMEMBERS", self._names.leases))
        keys = sorted(raw.decode() for raw in checked(reply, "leases"))
        prefix = self._names.key("lease") + ":"
        if kind is not None:
            keys = [key for key in keys if key.startswith(f"{prefix}{kind}:")]
        if not keys:
            return []
        (values,) = await self._link.call(("MGET", *keys))
        found: list[LeaseInfo] = []
        expired: list[str] = []
        for key, value in zip(keys, checked(values, "leases"), strict=True):
            if value is None:
                expired.append(key)
                continue
            lease_kind, _, name = key.removeprefix(prefix).partition(":")
            epoch, info = _parse(value)
            found.append(LeaseInfo(lease_kind, name, epoch, info))
        if expired:
            await self._forget(expired)
        return sorted(found, key=lambda lease: (lease.kind, lease.name))

    async def _forget(self, keys: Sequence[str]) -> None:
        """Remove expired leases from the index, except those acquired again meanwhile."""
        async with self._transaction.lock:
            values = await self._watch_lease(*keys)
            gone = [key for key, value in zip(keys, values, strict=True) if value is None]
            if gone:
                await self._exec([("SREM", self._names.leases, *gone)])

    # -- transactions -------------------------------------------------------------------------------------------------
    def _keys(self, kind: str, name: str) -> tuple[str, str]:
        return self._names.lease(kind, name), self._names.key("granted", kind, name)

    def _set_commands(
        self, key: str, granted: str, epoch: int, info: Mapping[str, JsonValue], ttl_s: float
    ) -> list[Command]:
        value = encode_state({"epoch": epoch, "info": dict(info)})
        return [
            ("SET", key, value, "PX", to_ms(ttl_s)),
            ("SADD", self._names.leases, key),
            ("SET", granted, str(epoch), "PX", _GRANT_MS),
        ]

    async def _watch_lease(self, *keys: str) -> list[Reply]:
        """Watch keys and return their values."""
        (values,) = await self._transaction.watch(keys, ("MGET", *keys))
        return list(checked(values, "lease"))

    async def _exec(self, commands: Sequence[Command]) -> bool:
        """Run commands if no watched key has changed."""
        return exec_results(await self._transaction.exec(commands), "lease") is not None


def _after(last: Reply) -> int:
    """The epoch after ``last``, the value of the counter, which may be missing or have been rolled back."""
    return max(int(last or 0) + 1, time.time_ns() // 1_000_000)


def _parse(value: bytes) -> tuple[int, Mapping[str, JsonValue]]:
    state = decode_state(value)
    epoch, info = state.get("epoch"), state.get("info")
    if type(epoch) is not int or not isinstance(info, dict):
        raise CodecError("a lease without epoch and info: is another program writing our keys?")
    return epoch, info


class RedisState:
    """Small JSON objects under names, alone or as rows of tables."""

    def __init__(self, link: RedisLink, names: Names) -> None:
        self._link = link
        self._names = names

    async def put(self, name: str, value: Mapping[str, JsonValue], ttl_s: float | None) -> None:
        """See :meth:`pagebus.bus.contract.Bus.put_state`."""
        command: Command = ("SET", self._names.state(name), encode_state(value))
        if ttl_s is not None:
            command = (*command, "PX", to_ms(ttl_s))
        (reply,) = await self._link.call(command)
        checked(reply, f"state {name}")

    async def get(self, names: Sequence[str]) -> list[Mapping[str, JsonValue] | None]:
        """See :meth:`pagebus.bus.contract.Bus.get_state`."""
        if not names:
            return []
        (reply,) = await self._link.call(("MGET", *map(self._names.state, names)))
        return [None if raw is None else decode_state(raw) for raw in checked(reply, "state")]

    async def delete(self, names: Sequence[str]) -> None:
        """See :meth:`pagebus.bus.contract.Bus.delete_state`."""
        if names:
            (reply,) = await self._link.call(("DEL", *map(self._names.state, names)))
            checked(reply, "state")

    async def put_row(self, table: str, row: str, value: Mapping[str, JsonValue], *, replace: bool) -> bool:
        """See :meth:`pagebus.bus.contract.Bus.put_row`."""
        command = "HSET" if replace else "HSETNX"
        (reply,) = await self._link.call((command, self._names.table(table), row, encode_state(value)))
        return bool(checked(reply, f"row {row} of {table}"))

    async def get_rows(self, table: str) -> dict[str, Mapping[str, JsonValue]]:
        """See :meth:`pagebus.bus.contract.Bus.get_rows`."""
        (reply,) = await self._link.call(("HGETALL", self._names.table(table)))
        return {row.decode(): decode_state(raw) for row, raw in pairs(checked(reply, f"rows of {table}")).items()}

    async def delete_row(self, table: str, row: str) -> bool:
        """See :meth:`pagebus.bus.contract.Bus.delete_row`."""
        (reply,) = await self._link.call(("HDEL", self._names.table(table), row))
        return bool(checked(reply, f"row {row} of {table}"))
