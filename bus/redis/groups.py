"""Consumer groups on Redis: a consumer reads its own pending entries first; acks; claims."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from math import inf
from time import monotonic

from pagebus.bus.codec import encode
from pagebus.bus.contract import COUNTERS_KEPT_S, BusUnavailable, Completion, Entry, EntryId
from pagebus.bus.redis.link import Command, RedisLink
from pagebus.bus.redis.replies import (
    checked,
    exec_results,
    is_group_exists,
    is_no_group,
    is_no_key,
    pairs,
    refusal,
    stream_parts,
    to_entry,
)
from pagebus.bus.redis.strays import find_strays
from pagebus.bus.redis.stream import Reply
from pagebus.bus.redis.transaction import RedisTransaction

_PAGE = 256
LOOK_AGAIN_S = 5.0
"""Seconds between checks for entries that were delivered but never received."""


_Reader = tuple[str, str, str]
"""(stream, group, consumer)."""


class RedisGroups:
    """The consumer-group part of the bus.

    ``_held``: entries handed out by this object and not yet acked; none is handed out twice.

    ``_recovered``: when all pending entries of a reader were last seen to be held. A failed read removes its streams,
    because the server may have delivered entries that never arrived; they are in the pending list now. The list is
    read again after a while in any case, because a server may serve a read after its connection was given up.

    ``_left_over``: delivery counts of entries that an earlier life of the reader was given, this delivery included.
    Entries that a lost connection took along were given to nobody, and are not counted again.
    """

    def __init__(self, link: RedisLink, completion_link: RedisLink) -> None:
        self._link = link
        self._transaction = RedisTransaction(completion_link)
        self._held: dict[tuple[str, str], set[EntryId]] = {}
        self._recovered: dict[_Reader, float] = {}
        self._left_over: dict[_Reader, dict[bytes, int]] = {}
        self._looked_once: set[_Reader] = set()
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
        """One round: pending entries if there are any, else new ones; [] after ``block_ms`` (0: no wait)."""
        key = (group, consumer, streams)
        with self._handing_out(streams, group, consumer) as entries:
            if (under_way := self._reading.get(key)) is None:
                await self._recover(group, consumer, streams, count, entries)
                if entries:
                    return entries
                block: Command = ("BLOCK", block_ms) if block_ms > 0 else ()
                command = ("XREADGROUP", "GROUP", group, consumer, "COUNT", count, *block, "STREAMS", *streams)
                under_way = reader.submit([(*command, *([">"] * len(streams)))], block_s=block_ms / 1000)
                self._reading[key] = under_way
            elif not under_way.done():
                await asyncio.wait((under_way,), timeout=block_ms / 1000)
                if not under_way.done():
                    return []
            try:
                # A cancelled caller leaves the read in place: the next call gets its entries, so none is stranded.
                (reply,) = await asyncio.shield(under_way)
            except BusUnavailable:
                self._reading.pop(key, None)
                raise
        self._reading.pop(key, None)
        if is_no_group(reply):
            await self.create(streams, group)
            return await self.read(reader, group, consumer, streams, count, block_ms)
        parts = stream_parts(checked(reply, f"read of group {group}"))
        return self._hold(group, [to_entry(name, raw, flat) for name, items in parts for raw, flat in items if flat])

    @contextmanager
    def _handing_out(self, streams: Iterable[str], group: str, consumer: str) -> Iterator[list[Entry]]:
        """Mark entries collected inside the block as held, so that no other read returns them. On failure they are
        released, and the next read searches for them again."""
        entries: list[Entry] = []
        try:
            yield entries
        except BaseException:
            for entry in entries:
                self._held[entry.stream, group].discard(entry.id)
            for stream in streams:
                self._recovered.pop((stream, group, consumer), None)
            raise

    def _hold(self, group: str, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            self._held.setdefault((entry.stream, group), set()).add(entry.id)
        return entries

    async def _recover(
        self, group: str, consumer: str, streams: Iterable[str], count: int, entries: list[Entry]
    ) -> None:
        """Add to ``entries`` what is pending for the consumer and not held, at most ``count`` per stream."""
        since_s = monotonic() - LOOK_AGAIN_S
        for stream in streams:
            if self._recovered.get((stream, group, consumer), -inf) < since_s:
                await self._recover_stream(group, consumer, stream, count, entries)

    async def _recover_stream(self, group: str, consumer: str, stream: str, count: int, entries: list[Entry]) -> None:
        reader = (stream, group, consumer)
        room, start = count, "-"
        if reader not in self._recovered:
            room -= await self._adopt(reader, room, entries)
        if not room:
            return
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
            left = {row[0]: int(row[3]) for row in rows if EntryId.parse(row[0]) not in held}
            known = self._left_over.setdefault(reader, {})
            if reader not in self._looked_once:
                known.update({raw: times + 1 for raw, times in left.items() if raw not in known})
            deliveries = [(raw, known.get(raw, times)) for raw, times in left.items()]
            while deliveries and room:
                # Claiming one's own entries returns them, and forgets those that were deleted.
                batch, deliveries = dict(deliveries[:room]), deliveries[room:]
                room -= await self._claim_rows(stream, group, consumer, batch, entries)
            if not room:
                return
        self._looked_once.add(reader)
        self._recovered[reader] = monotonic()

    async def _adopt(self, reader: _Reader, room: int, entries: list[Entry]) -> int:
        """Add stray entries to ``entries``; returns how many. They count as delivered once before."""
        stream, group, consumer = reader
        held = self._held.get((stream, group), set())
        found = [raw for raw in await find_strays(self._link, stream, group) if EntryId.parse(raw) not in held]
        return await self._claim_rows(stream, group, consumer, dict.fromkeys(found[:room], 2), entries) if found else 0

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

    async def complete(self, group: str, completions: Sequence[Completion]) -> list[str]:
        """Many completions per transaction. Of two consumers that complete the same entry, the later one finds that a
        key it watches was touched, and tries again."""
        told = [""] * len(completions)
        async with self._transaction.lock:
            for start in range(0, len(completions), _PAGE):
                left = dict(enumerate(completions[start : start + _PAGE], start))
                while left:
                    for place, problem in (await self._complete(group, left)).items():
                        told[place] = problem
        for each, problem in zip(completions, told, strict=True):
            if not problem:
                self._held.get((each.entry.stream, group), set()).discard(each.entry.id)
        return told

    async def _complete(self, group: str, left: dict[int, Completion]) -> dict[int, str]:
        """Find what is still pending and which streams accept messages; then store the rest. Finished completions are
        removed from ``left``. Returns why some cannot be stored."""
        streams = dict.fromkeys(each.stream for each in left.values())
        entries = [each.entry for each in left.values()]
        counters = dict.fromkeys(each.counters for each in left.values() if each.counter)
        replies = await self._transaction.watch(
            list(map(_touched, entries)),
            *(("XPENDING", each.stream, group, str(each.id), str(each.id), 1) for each in entries),
            *(("XLEN", stream) for stream in streams),
            *(("HGETALL", key) for key in counters),
        )
        lengths = replies[len(left) : len(left) + len(streams)]
        problems = {
            stream: refusal(reply, f"completions in {stream}") for stream, reply in zip(streams, lengths, strict=True)
        }
        refused: dict[int, str] = {}
        for (place, each), reply in zip(list(left.items()), replies, strict=False):
            is_pending = not is_no_group(reply) and checked(reply, "completions")
            if is_pending and problems[each.stream]:
                refused[place] = problems[each.stream]
            if not is_pending or place in refused:
                del left[place]
        kept = [key for key, reply in zip(counters, replies[-len(counters) :], strict=False) if not refusal(reply, key)]
        return refused | (await self._store(group, left, kept) if left else {})

    async def _store(self, group: str, left: dict[int, Completion], kept: Sequence[str]) -> dict[int, str]:
        """Run the transaction. It has no effect, and all are left, if one of the entries was completed meanwhile. If
        some are refused, the others are left. ``kept`` are the keys of counters that expire later from now on."""
        commands = {place: _completion_commands(group, each) for place, each in left.items()}
        ends = accumulate(map(len, commands.values()))
        spans = {place: slice(end - len(each), end) for (place, each), end in zip(commands.items(), ends, strict=True)}
        expiries: list[Command] = [("EXPIRE", key, COUNTERS_KEPT_S) for key in kept]
        _, *queued, results = await self._transaction.exec([*chain.from_iterable(commands.values()), *expiries])
        refused = {place: _refusal(queued[span], left[place]) for place, span in spans.items()}
        if not any(refused.values()) and results is not None:
            added = {place: checked(results, "completions")[span.start] for place, span in spans.items()}
            refused = {place: _refusal([reply], left[place]) for place, reply in added.items()}
            left.clear()
        refused = {place: problem for place, problem in refused.items() if problem}
        for place in refused:
            left.pop(place, None)
        return refused

    async def claim(self, stream: str, group: str, consumer: str, dead: str) -> list[Entry]:
        """Claim by consumer name, because idle times depend on the server's wall clock and prove nothing."""
        with self._handing_out([stream], group, consumer) as entries:
            while True:
                (pending,) = await self._link.call(("XPENDING", stream, group, "-", "+", _PAGE, dead))
                if is_no_group(pending):
                    return entries
                rows = checked(pending, f"claim from {dead}")
                if not rows:
                    break
                await self._claim_rows(stream, group, consumer, _delivered_again(rows), entries)
            # Should the dead one wake up and read just now, deleting it would strand what it was given: take that too.
            replies = await self._link.call(
                ("MULTI",),
                ("XPENDING", stream, group, "-", "+", _PAGE, dead),
                ("XGROUP", "DELCONSUMER", stream, group, dead),
                ("EXEC",),
            )
            results = exec_results(replies, f"claim from {dead}")
            if results and results[0]:
                await self._claim_rows(stream, group, consumer, _delivered_again(results[0]), entries)
        return entries

    async def _claim_rows(
        self, stream: str, group: str, consumer: str, deliveries: Mapping[bytes, int], entries: list[Entry]
    ) -> int:
        """Claim pending entries with their delivery counts and add them to ``entries``; returns how many."""
        by_count: dict[int, list[bytes]] = {}
        for raw, times in deliveries.items():
            by_count.setdefault(times, []).append(raw)
        commands: list[Command] = [
            ("XCLAIM", stream, group, consumer, 0, *ids, "RETRYCOUNT", times, "FORCE")
            for times, ids in by_count.items()
        ]
        items = [
            item
            for reply in (await self._link.call(*commands) if commands else ())
            for item in checked(reply, f"claim for {consumer}")
            if item and item[1]
        ]
        claimed = [to_entry(stream, raw, flat, deliveries[raw]) for raw, flat in items]
        entries += self._hold(group, sorted(claimed, key=lambda entry: entry.id))
        return len(claimed)

    async def consumers(self, stream: str, group: str) -> dict[str, int]:
        """Pending counts by consumer; {} if there is no such group."""
        (reply,) = await self._link.call(("XINFO", "CONSUMERS", stream, group))
        if is_no_key(reply) or is_no_group(reply):
            return {}
        rows = map(pairs, checked(reply, f"consumers of {group}"))
        return {row[b"name"].decode(): int(row[b"pending"]) for row in rows}

    async def holders(self, stream: str, group: str, ids: Sequence[EntryId]) -> dict[EntryId, str]:
        """The consumer that has each entry pending."""
        replies = await self._link.call(*(("XPENDING", stream, group, str(i), str(i), 1) for i in ids)) if ids else []
        found = [() if is_no_group(reply) else checked(reply, f"holders in {stream}") for reply in replies]
        return {each: rows[0][1].decode() for each, rows in zip(ids, found, strict=True) if rows}

    def let_go(self, stream: str, group: str, ids: Iterable[EntryId]) -> None:
        """Hand them out again should they be this consumer's again."""
        self._held.get((stream, group), set()).difference_update(ids)
        self._recovered = {reader: at_s for reader, at_s in self._recovered.items() if reader[:2] != (stream, group)}


def _touched(entry: Entry) -> str:
    """A key that never exists. Completing the entry touches it, so that watchers of the key notice."""
    return f"{entry.stream}:answered:{entry.id}"


def _refusal(replies: Iterable[Reply], completion: Completion) -> str:
    """Why one of the commands of a completion is refused for good; "" if none is."""
    return next(filter(None, (refusal(reply, f"completion of {completion.entry.id}") for reply in replies)), "")


def _completion_commands(group: str, completion: Completion) -> list[Command]:
    """The commands of a completion, its message first. Only the count fails if the key of counters is no hash."""
    stream, entry_id, touched = completion.entry.stream, str(completion.entry.id), _touched(completion.entry)
    frame = chain.from_iterable(encode(completion.message).items())
    count: list[Command] = [("HINCRBY", completion.counters, completion.counter, 1)] if completion.counter else []
    return [
        ("XADD", completion.stream, "*", *frame),
        ("XACK", stream, group, entry_id),
        ("XDEL", stream, entry_id),
        ("SET", touched, ""),
        ("DEL", touched),
        *count,
    ]


def _delivered_again(rows: Sequence[Reply]) -> dict[bytes, int]:
    """Delivery counts of entries once they are delivered now, from rows of XPENDING."""
    return {row[0]: int(row[3]) + 1 for row in rows}
