"""Consumer groups on Redis: reading one's own pending entries first, acks, claims."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from math import inf
from time import monotonic

from bus.contract import BusUnavailable, Entry, EntryId
from bus.redis_link import Command, RedisLink, Reply
from bus.redis_replies import (
    checked,
    exec_results,
    is_group_exists,
    is_no_group,
    is_no_key,
    pairs,
    stream_parts,
    to_entry,
)

_PAGE = 256
LOOK_AGAIN_S = 5.0
"""How often a consumer looks for entries that it was given and never got."""


class RedisGroups:
    """The consumer-group half of the bus.

    ``_held`` are the entries handed out by this object and not yet acked. ``_recovered`` says when all left-over ones
    of a (stream, group, consumer) had been handed out. A failed read takes its streams out again, because what it was
    given, if anything, is in the pending list now; what is held is not handed out twice. After a while it is looked
    again in any case: a server may serve a read whose connection we have given up after we looked.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._held: dict[tuple[str, str], set[EntryId]] = {}
        self._recovered: dict[tuple[str, str, str], float] = {}
        self._reading: dict[tuple[str, str, tuple[str, ...]], asyncio.Future[list[Reply]]] = {}

    async def create(self, streams: Iterable[str], group: str) -> None:
        """Create groups that read from the start, and their streams; those that exist stay as they are."""
        replies = await self._link.call(*(("XGROUP", "CREATE", stream, group, "0", "MKSTREAM") for stream in streams))
        for reply in replies:
            if not is_group_exists(reply):
                checked(reply, f"group {group}")

    async def read(
        self, reader: RedisLink, group: str, consumer: str, streams: tuple[str, ...], count: int, block_ms: int
    ) -> list[Entry]:
        """One round: pending entries while there are any, else new ones; [] when ``block_ms`` (0: none) pass."""
        key = (group, consumer, streams)
        try:
            if (under_way := self._reading.get(key)) is None:
                if entries := await self._recover(group, consumer, streams, count):
                    return entries
                block: Command = ("BLOCK", block_ms) if block_ms > 0 else ()
                command = ("XREADGROUP", "GROUP", group, consumer, "COUNT", count, *block, "STREAMS", *streams)
                under_way = reader.submit([(*command, *([">"] * len(streams)))], block_s=block_ms / 1000)
                self._reading[key] = under_way
            elif not under_way.done():
                await asyncio.wait((under_way,), timeout=block_ms / 1000)
                if not under_way.done():
                    return []
            # A cancelled caller leaves the read in place: the next call gets its entries, so none is stranded.
            (reply,) = await asyncio.shield(under_way)
        except BusUnavailable:
            self._reading.pop(key, None)
            for stream in streams:
                self._recovered.pop((stream, group, consumer), None)
            raise
        self._reading.pop(key, None)
        if is_no_group(reply):
            await self.create(streams, group)
            return await self.read(reader, group, consumer, streams, count, block_ms)
        parts = stream_parts(checked(reply, f"read of group {group}"))
        return self._hold(group, [to_entry(name, raw, flat) for name, items in parts for raw, flat in items if flat])

    def _hold(self, group: str, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            self._held.setdefault((entry.stream, group), set()).add(entry.id)
        return entries

    async def _recover(self, group: str, consumer: str, streams: Iterable[str], count: int) -> list[Entry]:
        """What is pending for the consumer and not held, at most ``count`` per stream."""
        entries: list[Entry] = []
        since_s = monotonic() - LOOK_AGAIN_S
        for stream in streams:
            if self._recovered.get((stream, group, consumer), -inf) < since_s:
                entries += await self._recover_stream(group, consumer, stream, count)
        return entries

    async def _recover_stream(self, group: str, consumer: str, stream: str, count: int) -> list[Entry]:
        entries: list[Entry] = []
        start = "-"
        while True:
            (reply,) = await self._link.call(("XPENDING", stream, group, start, "+", _PAGE, consumer))
            if is_no_group(reply):
                await self.create([stream], group)
                break
            rows = checked(reply, f"pending entries of {stream}")
            if not rows:
                break
            start = f"({rows[-1][0].decode()}"
            held = self._held.get((stream, group), set())
            left = [row for row in rows if EntryId.parse(row[0]) not in held]
            while left:
                if len(entries) == count:
                    return entries
                # Claiming one's own entries returns them, counts the delivery, and forgets those that were deleted.
                batch, left = left[: count - len(entries)], left[count - len(entries) :]
                entries += await self._claim_rows(stream, group, consumer, batch)
        self._recovered[stream, group, consumer] = monotonic()
        return entries

    async def ack(self, group: str, entries: Iterable[Entry]) -> None:
        """Ack and delete, in one transaction."""
        by_stream: dict[str, list[Entry]] = {}
        for entry in entries:
            by_stream.setdefault(entry.stream, []).append(entry)
        if not by_stream:
            return
        commands: list[Command] = [("MULTI",)]
        for stream, acked in by_stream.items():
            ids = [str(entry.id) for entry in acked]
            commands += [("XACK", stream, group, *ids), ("XDEL", stream, *ids)]
        exec_results(await self._link.call(*commands, ("EXEC",)), f"ack in group {group}")
        for stream, acked in by_stream.items():
            self._held.get((stream, group), set()).difference_update(entry.id for entry in acked)

    async def claim(self, stream: str, group: str, consumer: str, dead: str) -> list[Entry]:
        """Take over by consumer name: idle times follow the server's wall clock and prove nothing."""
        entries: list[Entry] = []
        while True:
            (pending,) = await self._link.call(("XPENDING", stream, group, "-", "+", _PAGE, dead))
            if is_no_group(pending):
                return entries
            rows = checked(pending, f"claim from {dead}")
            if not rows:
                break
            entries += await self._claim_rows(stream, group, consumer, rows)
        # Should the dead one wake up and read just now, deleting it would strand what it was given: take that as well.
        replies = await self._link.call(
            ("MULTI",),
            ("XPENDING", stream, group, "-", "+", _PAGE, dead),
            ("XGROUP", "DELCONSUMER", stream, group, dead),
            ("EXEC",),
        )
        results = exec_results(replies, f"claim from {dead}")
        if results and results[0]:
            entries += await self._claim_rows(stream, group, consumer, results[0])
        return self._hold(group, entries)

    async def _claim_rows(self, stream: str, group: str, consumer: str, rows: Sequence[Reply]) -> list[Entry]:
        counts = {row[0]: int(row[3]) for row in rows}
        command: Command = ("XCLAIM", stream, group, consumer, 0, *counts, "FORCE")
        (reply,) = await self._link.call(command)
        items = checked(reply, f"claim for {consumer}")
        entries = [to_entry(stream, item[0], item[1], counts[item[0]] + 1) for item in items if item and item[1]]
        return self._hold(group, entries)

    async def consumers(self, stream: str, group: str) -> dict[str, int]:
        """Pending counts by consumer; {} if there is no such group."""
        (reply,) = await self._link.call(("XINFO", "CONSUMERS", stream, group))
        if is_no_key(reply) or is_no_group(reply):
            return {}
        rows = map(pairs, checked(reply, f"consumers of {group}"))
        return {row[b"name"].decode(): int(row[b"pending"]) for row in rows}
