"""The outbox: actors queue messages without waiting, and one task sends them in order.

Everything queued during a round trip goes out in the next one. A send that fails with :class:`BusUnavailable` is
repeated with growing pauses until it succeeds. Entries of log streams have explicit ids, so their repeats are
recognised. A published message may arrive twice; its readers allow for that.

A restarted server may have lost entries that it had confirmed. Appending further entries would hide the loss, and
readers would find a gap. After a restart the outbox therefore first checks that the entries it knows to be stored are
there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any

from pagebus.bus.backoff import Backoff
from pagebus.bus.codec import encode
from pagebus.bus.contract import Bus, BusUnavailable, CodecError, EntryId, LogEntry, ServerRolledBack
from pagebus.bus.messages import Message

OUTBOX_LIMIT = 65_536
"""Default limit of queued messages; far above what a healthy actor ever queues."""
_BATCH = 128
TURNS = 5
"""The most turns of an event loop from an answer's arrival until the messages behind it are sent; three or four are
usual."""
BATCH_BYTES = 2**18
"""Size in bytes above which a batch ends. A batch is written and stored as a whole, and the actor's other messages wait
for it."""


class OutboxFull(BusUnavailable):
    """The outbox is full, because the bus has been unreachable or too slow for long; the message was not queued."""


class Outbox:
    """Outgoing messages of one actor. All methods belong to the event loop's thread.

    Args:
        bus: where they go.
        epoch: the lease epoch under which this actor writes log streams.
        limit: how many messages may wait.

    Attributes:
        queued: how many messages have been queued so far: what :meth:`stored` can be asked about.
        retries: how many sends had to be repeated so far.
        trouble: why the last send failed; "" while all is well.
    """

    def __init__(self, bus: Bus, epoch: int, *, limit: int = OUTBOX_LIMIT, backoff: Backoff | None = None) -> None:
        self.epoch = epoch
        self.queued = 0
        self.retries = 0
        self.trouble = ""
        self._on_unsendable: Callable[[Message, CodecError], None] | None = None
        self._bus = bus
        self._limit = limit
        self._backoff = backoff or Backoff()
        self._queue: deque[LogEntry | tuple[str, Message, int]] = deque()
        self._indexes: dict[str, int] = {}
        self._stored: dict[str, EntryId] = {}
        """The last entry of this epoch that the server has confirmed, by log stream."""
        self._restarts = self._survived = 0
        """The number of server restarts, and the last one after which nothing was found to be lost."""
        self._is_idle = False
        """Whether :meth:`run` waits for messages."""
        self._num_begun = 0
        """How many of the queue's first messages are on their way."""
        self._begun: Coroutine[Any, Any, None] | None = None
        """The wait for their answer, if :meth:`hurry` has sent them."""
        self._wake = asyncio.Event()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failure: BaseException | None = None

    def drop_unsendable(self, tell: Callable[[Message, CodecError], None]) -> None:
        """Drop published messages that cannot be encoded, each with a call of ``tell``. Without this they end
        :meth:`run`. Entries of log streams always do, because a missing entry would be a gap."""
        self._on_unsendable = tell

    @property
    def depth(self) -> int:
        """Messages not yet known to be stored."""
        return len(self._queue)

    def append(self, stream: str, message: Message) -> EntryId:
        """Queue a message for a log stream under the next id of this epoch (index 1, 2, ...), and return that id.

        Raises:
            OutboxFull: nothing was queued and no index was used up.
        """
        self._check()
        index = self._indexes.get(stream, 0) + 1
        self._indexes[stream] = index
        entry_id = EntryId(self.epoch, index)
        self._put(LogEntry(stream, entry_id, message))
        return entry_id

    def append_at(self, stream: str, entry_id: EntryId, message: Message) -> None:
        """Queue a message for a log stream under an id of the caller's, such as a fence.

        Raises:
            OutboxFull: nothing was queued.
        """
        self._check()
        self._put(LogEntry(stream, entry_id, message))

    def publish(self, stream: str, message: Message, *, num_bytes: int = 0) -> None:
        """Queue a message for a work stream or mailbox. ``num_bytes``: about how long it is, if it is long.

        Raises:
            OutboxFull: nothing was queued.
        """
        self._check()
        self._put((stream, message, num_bytes))

    def _check_running(self) -> None:
        if self._failure is not None:
            raise BusUnavailable(f"the outbox has stopped: {self._failure}") from self._failure

    def _check(self) -> None:
        self._check_running()
        if len(self._queue) >= self._limit:
            raise OutboxFull(f"{len(self._queue)} messages wait to be sent ({self.trouble or 'the bus is too slow'})")

    def _put(self, item: LogEntry | tuple[str, Message, int]) -> None:
        self._queue.append(item)
        self.queued += 1
        self._wake.set()

    def hurry(self) -> None:
        """Send what is queued at once, if nothing is on its way, instead of in the turn of :meth:`run`: the loop's
        other tasks may take longer than the message."""
        if self._is_idle and self._queue and self._begun is None and self._restarts == self._survived:
            with suppress(BusUnavailable, CodecError):  # as it will be found again
                self._begun = self._begin()

    async def turn(self) -> None:
        """Let the event loop turn. If queued messages wait for an answer that may have arrived, let it turn until they
        are on their way: a caller that then works for long would delay them by as much."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
            if len(self._queue) <= self._num_begun:
                return

    async def flush(self) -> None:
        """Wait until everything queued is stored.

        Raises:
            BusUnavailable: :meth:`run` has ended, so nothing more will be sent.
        """
        await self.stored(self.queued)

    async def stored(self, count: int) -> None:
        """Wait until the first ``count`` messages ever queued are stored. A wait may last until a longer one that began
        earlier is over.

        Raises:
            BusUnavailable: :meth:`run` has ended, so nothing more will be sent.
        """
        if self.queued - len(self._queue) >= count:
            return
        self._check_running()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, future))
        await future
        if self.queued - len(self._queue) < count:
            self._check_running()

    def bus_restarted(self) -> None:
        """Note that the server was restarted: nothing is sent before the outbox has checked what is still stored."""
        self._restarts += 1
        self._wake.set()

    def forget(self, streams: Iterable[str]) -> None:
        """Forget deleted log streams, so that their loss is not reported."""
        for stream in streams:
            self._stored.pop(stream, None)

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            Fenced: another writer has replaced this one.
            ServerRolledBack: the server has lost what it had confirmed. Readers may have read it, or may wait for it
                for ever.
            CodecError: a message that cannot be encoded, and nobody to tell.
        """
        try:
            while True:
                self._is_idle = not self._wake.is_set()
                await self._wake.wait()
                self._is_idle = False
                try:
                    await self._check_survival()
                    await self._send_next()
                    if self._queue:
                        await asyncio.sleep(0)  # yield: a bus that answers at once would starve other tasks
                except BusUnavailable as error:
                    self.retries += 1
                    self.trouble = str(error)
                    await asyncio.sleep(self._backoff.next_s())
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._is_idle = False
            if self._begun is not None:
                self._begun.close()
            self._tell(self.queued)

    async def _check_survival(self) -> None:
        """Check that a restarted server still has all that it had confirmed. It may restart again meanwhile."""
        while (restarts := self._restarts) > self._survived:
            for stream, last in list(self._stored.items()):
                if (found := await self._bus.last_id(stream)) < last and stream in self._stored:  # else just deleted
                    raise ServerRolledBack(
                        f"{stream} ends with {found}, {last} had been stored: the server has lost entries"
                    )
            self._survived = restarts

    def _begin(self) -> Coroutine[Any, Any, None]:
        """Send the longest run of one kind at the head of the queue, in one round trip. Returns the wait for the
        answer."""
        entries: list[LogEntry] = []
        items: list[tuple[str, Message]] = []
        num_bytes = 0
        for item in islice(self._queue, _BATCH):
            if isinstance(item, LogEntry):
                if items:
                    break
                entries.append(item)
            else:
                if entries or num_bytes > BATCH_BYTES:
                    break
                stream, message, size = item
                items.append((stream, message))
                num_bytes += size
        sending = self._bus.append(entries) if entries else self._bus.publish(items)
        self._num_begun = len(entries) + len(items)
        return sending

    async def _send_next(self) -> None:
        """Send the next messages, unless they are on their way, and wait until they are stored."""
        try:
            sending, self._begun = self._begun or self._begin(), None
            await sending
        except CodecError:
            if isinstance(self._queue[0], LogEntry) or self._on_unsendable is None:
                raise
            return self._drop_unsendable(self._on_unsendable)
        finally:
            count, self._num_begun = self._num_begun, 0
        self.trouble = ""
        self._backoff.reset()
        for item in [self._queue.popleft() for _ in range(count)]:
            if isinstance(item, LogEntry) and item.id.epoch == self.epoch:
                self._stored[item.stream] = item.id
        self._tell(self.queued - len(self._queue))
        if not self._queue and self._restarts == self._survived:
            self._wake.clear()

    def _drop_unsendable(self, tell: Callable[[Message, CodecError], None]) -> None:
        """Drop published messages that cannot be encoded from the first of the queue; the others are sent next."""
        items = list(takewhile(lambda item: not isinstance(item, LogEntry), islice(self._queue, _BATCH)))
        for _ in items:
            self._queue.popleft()
        for item in reversed(items):
            message = item.message if isinstance(item, LogEntry) else item[1]
            try:
                encode(message)
            except CodecError as error:
                tell(message, error)
            else:
                self._queue.appendleft(item)

    def _tell(self, count: int) -> None:
        """Wake those who wait for no more than ``count`` messages."""
        while self._waiting and self._waiting[0][0] <= count:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
