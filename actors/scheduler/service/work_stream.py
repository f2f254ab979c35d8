"""The scheduler's work streams: requests (``tokenized``), and messages about live ones (``control``).

A request's entry stays pending until the request is over, so that a successor finds it. Other entries stay pending
until their effect is stored. Delivery is at least once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from pagebus.bus.contract import Bus, Entry
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import SCHEDULER_GROUP, Names

READ_COUNT = 512
READ_BLOCK_MS = 1000


class WorkStream:
    """Reads work, and acknowledges it once it is settled.

    Args:
        consumer: the consumer name, unique to this scheduler.
        outbox: carries the effects of entries.
        confirm: waits until this scheduler is the leader for certain.
    """

    def __init__(
        self, bus: Bus, names: Names, consumer: str, outbox: Outbox, confirm: Callable[[], Awaitable[None]]
    ) -> None:
        self.requests: dict[str, Entry] = {}
        """Entries of all requests that are not over."""
        self.streams = [names.tokenized, names.control]
        self._bus = bus
        self._consumer = consumer
        self._outbox = outbox
        self._confirm = confirm
        self._settled: deque[Entry] = deque()
        self._any_settled = asyncio.Event()

    async def create_groups(self) -> None:
        """Create the consumer groups, before the first read."""
        for stream in self.streams:
            await self._bus.create_group(stream, SCHEDULER_GROUP)

    async def read(self, *, new_requests: bool) -> list[Entry]:
        """New entries; waits for them for a while. Without ``new_requests``, only messages about live requests."""
        streams = self.streams if new_requests else self.streams[1:]
        return await self._bus.read_group(
            SCHEDULER_GROUP, self._consumer, streams, count=READ_COUNT, block_ms=READ_BLOCK_MS
        )

    async def claim(self) -> AsyncIterator[Entry]:
        """Entries left by other schedulers, or delivered to them since: a frozen one may read once more before it
        learns that it has been replaced."""
        for stream in self.streams:
            consumers = await self._bus.consumers(stream, SCHEDULER_GROUP)
            for other in sorted(consumers.keys() - {self._consumer}):
                for entry in await self._bus.claim(stream, SCHEDULER_GROUP, self._consumer, other):
                    yield entry

    def asked_again(self, request_id: str, entry: Entry, *, same: bool) -> None:
        """Handle a further entry for a known request. If it is for the ``same`` attempt it replaces the first entry,
        which the bus may have lost."""
        if same:
            entry, self.requests[request_id] = self.requests[request_id], entry
        self.settled(entry)

    def over(self, request_id: str) -> None:
        """Settle the entry of a request that is over, so that no successor sees it."""
        if (entry := self.requests.pop(request_id, None)) is not None:
            self.settled(entry)

    def settled(self, entry: Entry) -> None:
        """Mark an entry as handled. Its effects are queued before any other task runs, because the loop plans and sends
        in the same turn."""
        self._settled.append(entry)
        self._any_settled.set()

    @property
    def has_settled(self) -> bool:
        """Whether there are entries to acknowledge."""
        return bool(self._settled)

    async def acknowledge_next(self) -> None:
        """Wait for a settled entry, and acknowledge it."""
        await self._any_settled.wait()
        await self.acknowledge()

    async def acknowledge(self) -> None:
        """Acknowledge settled entries, once their effects are stored."""
        batch = list(self._settled)
        if not batch:
            return  # the drain, beside the task that waits for the next, was faster, or that task was
        await self._outbox.stored(self._outbox.queued)
        await self._confirm()
        await self._bus.ack(SCHEDULER_GROUP, batch)
        acked = set(map(id, batch))
        while self._settled and id(self._settled[0]) in acked:  # else the other one was faster
            self._settled.popleft()
        if not self._settled:
            self._any_settled.clear()
