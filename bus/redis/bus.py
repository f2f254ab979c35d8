"""The bus on a Redis server (7.0 or newer; only commands that 7.0 has).

Writes share one connection. Leases and completions have one each, and so does each blocking read under way. Nothing is
retried here: a write that failed with :class:`BusUnavailable` may have been applied, and only the caller knows whether
a repeat is harmless (:mod:`pagebus.bus.outbox`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any

from pagebus.bus.backoff import Backoff
from pagebus.bus.codec import encode
from pagebus.bus.contract import (
    Bus,
    BusError,
    BusUnavailable,
    Completion,
    Counts,
    Entry,
    EntryId,
    Fenced,
    LeaseInfo,
    LogEntry,
    fence_reason,
)
from pagebus.bus.dead_letters import DEAD_LETTERS_KEPT, dead_letter_frame
from pagebus.bus.messages import JsonValue, Message
from pagebus.bus.redis.groups import RedisGroups
from pagebus.bus.redis.leases import RedisLeases, RedisState
from pagebus.bus.redis.link import COMMAND_TIMEOUT_S, Command, RedisLink, Servers, UrlRefused, info_of
from pagebus.bus.redis.replies import (
    checked,
    is_no_key,
    is_refused_id,
    is_wrong_type,
    pairs,
    stream_parts,
    to_entry,
)
from pagebus.bus.redis.stream import Reply
from pagebus.bus.redis.url import parse_redis_url
from pagebus.bus.streams import Names

MAX_BLOCK_MS = 2000
"""Longest BLOCK sent to the server; longer waits are made of several."""
_OLDEST_SERVER = (7, 0)
_LOG = logging.getLogger("bus")


class RedisBus(Bus):
    """One actor's connections to Redis.

    Args:
        url: see :mod:`pagebus.bus.redis.url`.
        names: the deployment's names.
        client_name: shown by CLIENT LIST.
        connect_timeout_s: how long :meth:`connect` keeps trying.
        command_timeout_s: a server that does not answer a command for so long counts as unavailable.
    """

    def __init__(
        self,
        url: str,
        names: Names | None = None,
        *,
        client_name: str = "pagebus",
        connect_timeout_s: float = 30.0,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.names = names or Names()
        self._target = parse_redis_url(url)
        self._client_name = "".join(char if "!" <= char <= "~" else "_" for char in client_name)
        self._connect_timeout_s = connect_timeout_s
        self._command_timeout_s = command_timeout_s
        self._servers = Servers(lambda: self.on_restart())
        self._writer = self._link("write", writes=True)
        self._lease_link = self._link("lease", writes=True)
        self._readers: list[RedisLink] = []
        self._abandoned: dict[Command, asyncio.Future[list[Reply]]] = {}
        self._completion_link = self._link("completion", writes=True)
        self._groups = RedisGroups(self._writer, self._completion_link)
        self._leases = RedisLeases(self._lease_link, self.names)
        self._state = RedisState(self._writer, self.names)
        self._closed = False

    def _link(self, purpose: str, *, writes: bool = False) -> RedisLink:
        name = f"{self._client_name}:{purpose}"
        return RedisLink(self._target, name, timeout_s=self._command_timeout_s, writes=writes, servers=self._servers)

    # -- life ---------------------------------------------------------------------------------------------------------
    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connect_timeout_s
        backoff = Backoff()
        told = False
        while True:
            try:
                (info,) = await self._writer.call(("INFO",))
                break
            except UrlRefused:
                raise
            except BusUnavailable as error:
                pause_s = backoff.next_s()
                if self._closed or loop.time() + pause_s > deadline:
                    raise
                if not told:
                    told = True
                    _LOG.warning("waiting up to %g s for the bus: %s", self._connect_timeout_s, error)
                await asyncio.sleep(pause_s)
        if told:
            _LOG.warning("the bus at %s answers now", self._target.text)
        if isinstance(info, bytes):
            self._check_server(info_of(info))
        else:
            await self.ping()  # a user without the right to INFO: be content that the server answers

    def _check_server(self, facts: Mapping[str, str]) -> None:
        version = facts.get("redis_version", "")
        numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
        if len(numbers) == 2 and tuple(numbers) < _OLDEST_SERVER:
            raise BusError(f"Redis at {self._target.text} is version {version}: Pagebus needs 7.0 or newer")
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
            self.advice = f"Redis may evict our keys (maxmemory-policy {policy}): set maxmemory-policy noeviction"

    async def close(self) -> None:
        self._closed = True
        for link in (self._writer, self._lease_link, self._completion_link, *self._readers):
            await link.close()

    async def ping(self) -> float:
        started = perf_counter()
        checked((await self._writer.call(("PING",)))[0], "ping")
        return perf_counter() - started

    def _reserve_reader(self) -> RedisLink:
        """An idle reading connection; one whose caller was cancelled stays busy until its BLOCK ends."""
        if self._closed:
            raise BusUnavailable("this bus is closed")
        link = next((link for link in self._readers if not link.busy and not link.reserved), None)
        if link is None:
            link = self._link("read")
            self._readers.append(link)
        link.reserve()
        return link

    # -- work streams and mailboxes -----------------------------------------------------------------------------------
    def publish(self, items: Iterable[tuple[str, Message]]) -> Coroutine[Any, Any, None]:
        commands: list[Command] = [
            _xadd(stream, "*", encode(message), *(("NOMKSTREAM",) if self.names.is_kept(stream) else ()))
            for stream, message in items
        ]
        return self._published(commands, self._all_or_none(commands))

    @staticmethod
    async def _published(commands: Sequence[Command], sent: asyncio.Future[list[Reply]] | None) -> None:
        for reply, command in zip(await _replies(commands, sent, "publish"), commands, strict=True):
            checked(reply, f"publish to {command[1]!s}")

    def _all_or_none(self, commands: Sequence[Command]) -> asyncio.Future[list[Reply]] | None:
        """Send writes of which the server takes all or none; :func:`_replies` waits for the replies. Were only the
        first one refused (for want of memory, say), its repeat would come after the others: out of order in a mailbox,
        and in a log stream taken for one that had been written."""
        if len(commands) > 1:
            return self._writer.submit([("MULTI",), *commands, ("EXEC",)])
        return self._writer.submit(commands) if commands else None

    async def open_mailbox(self, stream: str, *, ttl_s: int) -> EntryId:
        commands = [_xadd(stream, "*", {b"opened": b""}, "MAXLEN", "0"), ("EXPIRE", stream, ttl_s)]
        added, expiring = await _replies(commands, self._all_or_none(commands), f"opening of {stream}")
        checked(expiring, f"opening of {stream}")
        return EntryId.parse(checked(added, f"opening of {stream}"))

    async def keep_mailbox(self, stream: str, *, ttl_s: int) -> bool:
        return bool(checked((await self._writer.call(("EXPIRE", stream, ttl_s)))[0], f"keeping of {stream}"))

    async def create_group(self, stream: str, group: str) -> None:
        await self._groups.create([stream], group)

    async def read_group(
        self, group: str, consumer: str, streams: Sequence[str], *, count: int = 128, block_ms: int = 1000
    ) -> list[Entry]:
        names, link = tuple(streams), self._reserve_reader()
        try:
            for part_ms in _block_parts(block_ms):
                try:
                    entries = await self._groups.read(link, group, consumer, names, count, part_ms)
                except BusUnavailable:
                    if self._closed:
                        return []
                    raise
                if entries:
                    return entries
        finally:
            link.free()
        return []

    async def ack(self, group: str, entries: Iterable[Entry]) -> None:
        await self._groups.ack(group, entries)

    async def complete(self, group: str, completions: Sequence[Completion]) -> list[str]:
        return await self._groups.complete(group, completions)

    async def claim(self, stream: str, group: str, consumer: str, dead_consumer: str) -> list[Entry]:
        if consumer == dead_consumer:
            raise ValueError("a consumer cannot claim from itself: its own pending entries come with its first read")
        return await self._groups.claim(stream, group, consumer, dead_consumer)

    async def consumers(self, stream: str, group: str) -> dict[str, int]:
        return await self._groups.consumers(stream, group)

    async def holders(self, stream: str, group: str, ids: Sequence[EntryId]) -> dict[EntryId, str]:
        return await self._groups.holders(stream, group, ids)

    def let_go(self, stream: str, group: str, ids: Iterable[EntryId]) -> None:
        self._groups.let_go(stream, group, ids)

    # -- log streams --------------------------------------------------------------------------------------------------
    def append(self, entries: Sequence[LogEntry]) -> Coroutine[Any, Any, None]:
        commands = [_xadd(entry.stream, str(entry.id), encode(entry.message)) for entry in entries]
        return self._appended(entries, commands, self._all_or_none(commands))

    async def _appended(
        self, entries: Sequence[LogEntry], commands: Sequence[Command], sent: asyncio.Future[list[Reply]] | None
    ) -> None:
        refused: list[LogEntry] = []
        for reply, entry in zip(await _replies(commands, sent, "append"), entries, strict=True):
            if is_refused_id(reply):
                refused.append(entry)
            else:
                checked(reply, f"append to {entry.stream}")
        if refused:
            await self._check_fenced(refused)

    async def _check_fenced(self, refused: Sequence[LogEntry]) -> None:
        """Tell one's own repeats, which are fine, from entries that a newer writer has overtaken."""
        streams = list(dict.fromkeys(entry.stream for entry in refused))
        replies = await self._writer.call(*(("XINFO", "STREAM", stream) for stream in streams))
        last = {stream: _last_id(reply, stream) for stream, reply in zip(streams, replies, strict=True)}
        for entry in refused:
            if reason := fence_reason(entry, last[entry.stream]):
                raise Fenced(reason)

    async def read(self, positions: Mapping[str, EntryId], *, count: int = 256, block_ms: int = 1000) -> list[Entry]:
        if not positions:
            await asyncio.sleep(min(block_ms, MAX_BLOCK_MS) / 1000)
            return []
        tail = ("STREAMS", *positions, *map(str, positions.values()))
        link = self._reserve_reader()
        try:
            for part_ms in _block_parts(block_ms):
                block: Command = ("BLOCK", part_ms) if part_ms > 0 else ()
                (reply,) = await self._read_once(link, ("XREAD", "COUNT", count, *block, *tail), part_ms)
                if self._closed:
                    return []
                if parts := stream_parts(checked(reply, "read")):
                    return [to_entry(name, raw, flat) for name, items in parts for raw, flat in items if flat]
        finally:
            link.free()
        return []

    async def _read_once(self, link: RedisLink, command: Command, block_ms: int) -> list[Reply]:
        """One XREAD. One whose caller was cancelled goes on, and the next caller with the same command joins it, so
        that cancelling often does not pile up connections."""
        under_way = self._abandoned.pop(command, None) or link.submit([command], block_s=block_ms / 1000)
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            if not under_way.done():
                self._abandoned[command] = under_way
                under_way.add_done_callback(lambda _: self._abandoned.pop(command, None))
            raise
        except BusUnavailable:
            if self._closed:
                return [None]
            raise

    async def last_id(self, stream: str) -> EntryId:
        return _last_id((await self._writer.call(("XINFO", "STREAM", stream)))[0], stream)

    async def trim(self, stream: str, through: EntryId) -> int:
        first_kept = EntryId(through.epoch, through.index + 1)
        if first_kept.index >= 2**64:
            first_kept = EntryId(through.epoch + 1, 0)
        (reply,) = await self._writer.call(("XTRIM", stream, "MINID", "=", str(first_kept)))
        return int(checked(reply, f"trim of {stream}"))

    async def remove(self, stream: str, ids: Iterable[EntryId]) -> int:
        named = [str(entry_id) for entry_id in ids]
        if not named:
            return 0
        return int(checked((await self._writer.call(("XDEL", stream, *named)))[0], f"removal from {stream}"))

    async def length(self, stream: str) -> int:
        return int(checked((await self._writer.call(("XLEN", stream)))[0], f"length of {stream}"))

    async def delete(self, *streams: str) -> None:
        if streams:
            checked((await self._writer.call(("UNLINK", *streams)))[0], "delete")

    async def dead_letter(self, stage: str, entry: Entry, reason: str) -> None:
        name = self.names.dead_letters(stage)
        command = _xadd(name, "*", dead_letter_frame(entry, reason), "MAXLEN", DEAD_LETTERS_KEPT)
        checked((await self._writer.call(command))[0], f"dead letter of {stage}")

    # -- small durable state ------------------------------------------------------------------------------------------
    async def put_state(self, name: str, value: Mapping[str, JsonValue], *, ttl_s: float | None = None) -> None:
        await self._state.put(name, value, ttl_s)

    async def get_state(self, *names: str) -> list[Mapping[str, JsonValue] | None]:
        return await self._state.get(names)

    async def count(self, counts: Counts, *, ttl_s: int) -> None:
        expiries: list[Command] = [("EXPIRE", key, ttl_s) for key in counts]
        added = [("HINCRBY", key, name, by) for key, more in counts.items() for name, by in more.items()]
        for reply in await self._writer.call(*added, *expiries):
            checked(reply, "count")

    async def counters(self, *keys: str) -> list[dict[str, int]]:
        replies = await self._writer.call(*(("HGETALL", key) for key in keys)) if keys else []
        found = [
            {} if is_wrong_type(reply) else pairs(checked(reply, f"counters {key}"))
            for reply, key in zip(replies, keys, strict=True)
        ]
        return [
            {name.decode(errors="replace"): int(value) for name, value in each.items() if _is_count(value)}
            for each in found
        ]

    async def delete_state(self, *names: str) -> None:
        await self._state.delete(names)

    async def put_row(self, table: str, row: str, value: Mapping[str, JsonValue], *, replace: bool = True) -> bool:
        return await self._state.put_row(table, row, value, replace=replace)

    async def get_rows(self, table: str) -> dict[str, Mapping[str, JsonValue]]:
        return await self._state.get_rows(table)

    async def delete_row(self, table: str, row: str) -> bool:
        return await self._state.delete_row(table, row)

    # -- leases -------------------------------------------------------------------------------------------------------
    async def acquire_lease(self, kind: str, name: str, info: Mapping[str, JsonValue], *, ttl_s: float) -> int:
        return await self._leases.acquire(kind, name, info, ttl_s=ttl_s)

    async def renew_lease(
        self, kind: str, name: str, epoch: int, info: Mapping[str, JsonValue], *, ttl_s: float
    ) -> bool:
        return await self._leases.renew(kind, name, epoch, info, ttl_s=ttl_s)

    async def release_lease(self, kind: str, name: str, epoch: int) -> None:
        await self._leases.release(kind, name, epoch)

    async def revoke_lease(self, kind: str, name: str, *, below: int = 0) -> int:
        return await self._leases.revoke(kind, name, below)

    async def leases(self, kind: str | None = None) -> list[LeaseInfo]:
        return await self._leases.live(kind)


async def _replies(commands: Sequence[Command], sent: asyncio.Future[list[Reply]] | None, what: str) -> list[Reply]:
    """The replies to the commands of :meth:`RedisBus._all_or_none`."""
    if sent is None:
        return []
    if len(commands) == 1:
        return await sent
    *queued, results = await sent
    for reply in queued:
        checked(reply, what)
    return list(checked(results, what))


def _xadd(stream: str, entry_id: str, frame: Mapping[bytes, bytes], *options: str | int) -> Command:
    return ("XADD", stream, *options, entry_id, *(part for item in frame.items() for part in item))


def _block_parts(block_ms: int) -> list[int]:
    """A wait as BLOCK times of at most MAX_BLOCK_MS; [0] means: do not wait."""
    whole, rest = divmod(max(0, block_ms), MAX_BLOCK_MS)
    return [MAX_BLOCK_MS] * whole + ([rest] if rest or not whole else [])


def _is_count(value: bytes) -> bool:
    """Whether it is an integer, as Redis counts: of 64 bits. Other programs may put anything there."""
    return len(value) <= 20 and value.removeprefix(b"-").isdigit()


def _last_id(reply: Reply, stream: str) -> EntryId:
    if is_no_key(reply):
        return EntryId()
    return EntryId.parse(pairs(checked(reply, f"last id of {stream}"))[b"last-generated-id"])
