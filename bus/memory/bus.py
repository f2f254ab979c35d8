"""The in-process bus: the whole contract without a server, for ``--bus memory://``, tests and simulation.

Each actor has its own :class:`MemoryBus`; all of them share one :class:`~pagebus.bus.memory.server.MemoryServer`.
Everything runs on one event loop. Other threads publish by handing their messages to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter

from pagebus.bus.codec import decode_state, encode, encode_state, entry_of
from pagebus.bus.contract import (
    COUNTERS_KEPT_S,
    Bus,
    BusUnavailable,
    Completion,
    Counts,
    Entry,
    EntryId,
    Fenced,
    LeaseInfo,
    LeaseTaken,
    LogEntry,
    fence_reason,
)
from pagebus.bus.dead_letters import DEAD_LETTERS_KEPT, dead_letter_frame
from pagebus.bus.memory.server import Group, MemoryLease, MemoryServer, MemoryStream, Pending, Position
from pagebus.bus.messages import JsonValue, Message
from pagebus.bus.streams import Names

__all__ = ["MemoryBus", "MemoryServer"]


class MemoryBus(Bus):
    """One actor's connection to a :class:`MemoryServer`."""

    def __init__(self, server: MemoryServer, names: Names | None = None) -> None:
        self.server = server
        super().__init__()
        self.names = names or Names()
        self._closed = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._recovered: set[tuple[str, str, str]] = set()
        self._held: dict[tuple[str, str], set[Position]] = {}

    # -- life ---------------------------------------------------------------------------------------------------------
    async def connect(self) -> None:
        self._check()

    async def close(self) -> None:
        self._closed = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def ping(self) -> float:
        started = perf_counter()
        await asyncio.sleep(0)
        self._check()
        return perf_counter() - started

    def _check(self) -> None:
        if self._closed:
            raise BusUnavailable("this bus is closed")
        self.server.check()

    # -- work streams and mailboxes -----------------------------------------------------------------------------------
    async def publish(self, items: Iterable[tuple[str, Message]]) -> None:
        self._check()
        for stream, frame in [(stream, encode(message)) for stream, message in items]:
            if stream in self.server.streams or not self.names.is_kept(stream):
                self.server.publish(stream, frame)

    async def open_mailbox(self, stream: str, *, ttl_s: int) -> EntryId:
        self._check()
        position = self.server.publish(stream, {})
        self.server.stream(stream).remove_through(position)
        self.server.expiries[stream] = self.server.clock() + ttl_s
        return EntryId(*position)

    async def keep_mailbox(self, stream: str, *, ttl_s: int) -> bool:
        self._check()
        if stream not in self.server.streams:
            return False
        self.server.expiries[stream] = self.server.clock() + ttl_s
        return True

    async def create_group(self, stream: str, group: str) -> None:
        self._check()
        self._group(stream, group)

    def _group(self, stream: str, group: str) -> Group:
        return self.server.stream(stream).groups.setdefault(group, Group())

    async def read_group(
        self, group: str, consumer: str, streams: Sequence[str], *, count: int = 128, block_ms: int = 1000
    ) -> list[Entry]:
        names = tuple(streams)

        def take() -> list[Entry]:
            for name in names:
                self._group(name, group).consumers[consumer] = None
            old = [entry for name in names for entry in self._take_pending(name, group, consumer, count)]
            return old or [entry for name in names for entry in self._take_new(name, group, consumer, count)]

        return await self._wait_for(take, names, block_ms)

    def _take_pending(self, name: str, group: str, consumer: str, count: int) -> list[Entry]:
        """What this consumer left pending before this bus was opened, oldest first; empty ever after."""
        key = (name, group, consumer)
        if key in self._recovered:
            return []
        stream = self.server.stream(name)
        held = self._held.setdefault((name, group), set())
        taken: list[Entry] = []
        members = stream.groups[group]
        for position in sorted(members.pending):
            pending = members.pending[position]
            if pending.consumer != consumer or position in held:
                continue
            if len(taken) == count:
                return taken
            if (fields := stream.fields.get(position)) is None:
                del members.pending[position]
                continue
            held.add(position)
            taken.append(entry_of(name, EntryId(*position), fields, pending.deliver_again()))
        self._recovered.add(key)
        return taken

    def _take_new(self, name: str, group_name: str, consumer: str, count: int) -> list[Entry]:
        stream = self.server.stream(name)
        group = stream.groups[group_name]
        positions = stream.after(group.delivered, count)
        group.deliver(positions, consumer)
        self._held.setdefault((name, group_name), set()).update(positions)
        return [entry_of(name, EntryId(*position), stream.fields[position]) for position in positions]

    async def ack(self, group: str, entries: Iterable[Entry]) -> None:
        self._check()
        for entry in entries:
            position = (entry.id.epoch, entry.id.index)
            self._held.get((entry.stream, group), set()).discard(position)
            stream = self.server.streams.get(entry.stream)
            if stream is None:
                continue
            if group in stream.groups:
                stream.groups[group].pending.pop(position, None)
            stream.remove(position)

    async def complete(self, group: str, completions: Sequence[Completion]) -> list[str]:
        self._check()
        for each in completions:
            _, members = self._existing_group(each.entry.stream, group)
            if members is not None and (each.entry.id.epoch, each.entry.id.index) in members.pending:
                self.server.publish(each.stream, encode(each.message))
                if each.counter:
                    self.server.count({each.counters: {each.counter: 1}}, COUNTERS_KEPT_S)
            await self.ack(group, [each.entry])
        return [""] * len(completions)

    async def claim(self, stream: str, group: str, consumer: str, dead_consumer: str) -> list[Entry]:
        self._check()
        if consumer == dead_consumer:
            raise ValueError("a consumer cannot claim from itself: its own pending entries come with its first read")
        found, members = self._existing_group(stream, group)
        if found is None or members is None:
            return []
        claimed = []
        held = self._held.setdefault((stream, group), set())
        for position in sorted(members.pending):
            pending = members.pending[position]
            if pending.consumer != dead_consumer:
                continue
            if (fields := found.fields.get(position)) is None:
                del members.pending[position]
                continue
            members.pending[position] = Pending(consumer, pending.deliveries + 1)
            held.add(position)
            claimed.append(entry_of(stream, EntryId(*position), fields, pending.deliveries + 1))
        members.consumers.pop(dead_consumer, None)
        if claimed:
            members.consumers[consumer] = None
        return claimed

    async def consumers(self, stream: str, group: str) -> dict[str, int]:
        self._check()
        _, members = self._existing_group(stream, group)
        if members is None:
            return {}
        counts = dict.fromkeys(members.consumers, 0)
        for pending in members.pending.values():
            counts[pending.consumer] += 1
        return counts

    async def holders(self, stream: str, group: str, ids: Sequence[EntryId]) -> dict[EntryId, str]:
        self._check()
        _, members = self._existing_group(stream, group)
        pending = {} if members is None else members.pending
        return {each: pending[each.epoch, each.index].consumer for each in ids if (each.epoch, each.index) in pending}

    def let_go(self, stream: str, group: str, ids: Iterable[EntryId]) -> None:
        self._held.get((stream, group), set()).difference_update((each.epoch, each.index) for each in ids)
        self._recovered = {key for key in self._recovered if key[:2] != (stream, group)}

    def _existing_group(self, stream: str, group: str) -> tuple[MemoryStream | None, Group | None]:
        found = self.server.streams.get(stream)
        return found, found.groups.get(group) if found is not None else None

    # -- log streams --------------------------------------------------------------------------------------------------
    async def append(self, entries: Sequence[LogEntry]) -> None:
        self._check()
        refused = []
        for entry, frame in [(entry, encode(entry.message)) for entry in entries]:
            position = (entry.id.epoch, entry.id.index)
            if position > self.server.stream(entry.stream).last:
                self.server.append(entry.stream, position, frame)
            else:
                refused.append(entry)
        for entry in refused:
            if reason := fence_reason(entry, EntryId(*self.server.stream(entry.stream).last)):
                raise Fenced(reason)

    async def read(self, positions: Mapping[str, EntryId], *, count: int = 256, block_ms: int = 1000) -> list[Entry]:
        wanted = [(name, (position.epoch, position.index)) for name, position in positions.items()]

        def take() -> list[Entry]:
            found = []
            for name, after in wanted:
                stream = self.server.streams.get(name)
                if stream is not None and stream.last > after:
                    found += [entry_of(name, EntryId(*at), stream.fields[at]) for at in stream.after(after, count)]
            return found

        return await self._wait_for(take, [name for name, _ in wanted], block_ms)

    async def _wait_for(self, take: Callable[[], list[Entry]], names: Sequence[str], block_ms: int) -> list[Entry]:
        """Call ``take`` until it finds something. Nothing is awaited after a find, so cancelling loses no entry."""
        self._check()
        await asyncio.sleep(0)  # a reader that always finds something must not starve the other actors of the loop
        loop = asyncio.get_running_loop()
        deadline = loop.time() + block_ms / 1000
        while not self._closed:
            self.server.check()
            entries = take()
            left_s = deadline - loop.time()
            if entries or left_s <= 0:
                return entries
            waiter = loop.create_future()
            self._waiters.add(waiter)
            try:
                await self.server.wait(names, waiter, left_s)
            finally:
                self._waiters.discard(waiter)
        return []

    async def last_id(self, stream: str) -> EntryId:
        self._check()
        found = self.server.streams.get(stream)
        return EntryId(*found.last) if found is not None else EntryId()

    async def trim(self, stream: str, through: EntryId) -> int:
        self._check()
        found = self.server.streams.get(stream)
        return found.remove_through((through.epoch, through.index)) if found is not None else 0

    async def remove(self, stream: str, ids: Iterable[EntryId]) -> int:
        self._check()
        found = self.server.streams.get(stream)
        return 0 if found is None else sum(found.remove((each.epoch, each.index)) for each in ids)

    async def length(self, stream: str) -> int:
        self._check()
        found = self.server.streams.get(stream)
        return len(found.ids) if found is not None else 0

    async def delete(self, *streams: str) -> None:
        self._check()
        for name in streams:
            self.server.drop(name)

    async def dead_letter(self, stage: str, entry: Entry, reason: str) -> None:
        self._check()
        name = self.names.dead_letters(stage)
        self.server.publish(name, dead_letter_frame(entry, reason))
        stream = self.server.stream(name)
        for position in stream.ids[:-DEAD_LETTERS_KEPT]:
            stream.remove(position)

    # -- small durable state ------------------------------------------------------------------------------------------
    async def put_state(self, name: str, value: Mapping[str, JsonValue], *, ttl_s: float | None = None) -> None:
        self._check()
        self.server.put_state(self.names.state(name), encode_state(value), ttl_s)

    async def get_state(self, *names: str) -> list[Mapping[str, JsonValue] | None]:
        self._check()
        found = [self.server.live_state(self.names.state(name)) for name in names]
        return [None if raw is None else decode_state(raw) for raw in found]

    async def count(self, counts: Counts, *, ttl_s: int) -> None:
        self._check()
        self.server.count(counts, ttl_s)

    async def counters(self, *keys: str) -> list[dict[str, int]]:
        self._check()
        return [dict(self.server.counters.get(key, {})) for key in keys]

    async def delete_state(self, *names: str) -> None:
        self._check()
        for name in names:
            self.server.states.pop(self.names.state(name), None)

    async def put_row(self, table: str, row: str, value: Mapping[str, JsonValue], *, replace: bool = True) -> bool:
        self._check()
        return self.server.put_row(self.names.table(table), row, encode_state(value), replace=replace)

    async def get_rows(self, table: str) -> dict[str, Mapping[str, JsonValue]]:
        self._check()
        return {row: decode_state(raw) for row, raw in self.server.table(self.names.table(table)).items()}

    async def delete_row(self, table: str, row: str) -> bool:
        self._check()
        return self.server.table(self.names.table(table)).pop(row, None) is not None

    # -- leases -------------------------------------------------------------------------------------------------------
    async def acquire_lease(self, kind: str, name: str, info: Mapping[str, JsonValue], *, ttl_s: float) -> int:
        self._check()
        key = self.names.lease(kind, name)
        if (lease := self.server.live_lease(key)) is not None:
            raise LeaseTaken(f"{kind} {name!r} is already running (epoch {lease.epoch})")
        encoded = encode_state(info)
        epoch = self.server.grant(key)
        self.server.leases[key] = MemoryLease(epoch, encoded, self.server.clock() + ttl_s)
        return epoch

    async def renew_lease(
        self, kind: str, name: str, epoch: int, info: Mapping[str, JsonValue], *, ttl_s: float
    ) -> bool:
        self._check()
        key = self.names.lease(kind, name)
        lease = self.server.live_lease(key)
        holder = lease.epoch if lease is not None else self.server.granted.get(key, epoch)
        if holder > epoch:
            raise Fenced(f"the lease of {kind} {name!r} belongs to epoch {holder} now, not to {epoch}")
        self.server.leases[key] = MemoryLease(epoch, encode_state(info), self.server.clock() + ttl_s)
        self.server.granted[key] = epoch
        return lease is not None and holder == epoch

    async def release_lease(self, kind: str, name: str, epoch: int) -> None:
        self._check()
        key = self.names.lease(kind, name)
        lease = self.server.live_lease(key)
        if lease is not None and lease.epoch == epoch:
            del self.server.leases[key]

    async def revoke_lease(self, kind: str, name: str, *, below: int = 0) -> int:
        self._check()
        key = self.names.lease(kind, name)
        if (lease := self.server.live_lease(key)) is not None and lease.epoch >= below:
            return 0
        self.server.leases.pop(key, None)
        return self.server.grant(key)

    async def leases(self, kind: str | None = None) -> list[LeaseInfo]:
        self._check()
        prefix = self.names.key("lease") + ":"
        found = []
        for key in sorted(self.server.leases):
            if not key.startswith(prefix):
                continue
            lease_kind, _, name = key[len(prefix) :].partition(":")
            if kind is not None and lease_kind != kind:
                continue
            if (lease := self.server.live_lease(key)) is not None:
                found.append(LeaseInfo(lease_kind, name, lease.epoch, decode_state(lease.info)))
        return sorted(found, key=lambda lease: (lease.kind, lease.name))
