"""Background responses: computed whether or not their clients wait. If their ingress dies, another one continues them.

Each is an entry of a work stream until it ends. The ingress that takes it up reads the events written so far, joins its
request and continues with the next event. All keys share the room for running responses. What a key has beyond its
share waits until some of its responses end.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from functools import partial

from pagebus.actors.runtime.actor import describe
from pagebus.bus.contract import Bus, BusUnavailable, Entry, EntryId
from pagebus.bus.messages import ResponseQueued
from pagebus.bus.streams import RESPONSES_GROUP, Names
from pagebus.web.access.admission import Charge, of_client
from pagebus.web.access.auth import ApiKey
from pagebus.web.access.key_share import key_share
from pagebus.web.adapters.response_events import OVER, ResponseEvents
from pagebus.web.adapters.response_input import parse_kept
from pagebus.web.adapters.translated import written
from pagebus.web.http.errors import ASKED_ELSEWHERE, ApiError, internal
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.routes.generate.responses import computed, used_tokens
from pagebus.web.server.context import Context
from pagebus.web.storage.responses import Piece, Record

MAX_RUNNING = 256
"""The most background responses that one ingress computes, or that wait there for room under its limits."""
MAX_DELIVERIES = 20
"""A response that has been taken up so often without an end is given up: it may be what crashes its ingresses."""
RETRY_S = 0.5
ELSEWHERE_S = 5.0
"""Pause before this ingress requests a response of its own again that another ingress has requested."""


class Background:
    """The background responses of the ingress ``name``."""

    def __init__(self, context: Context, bus: Bus, names: Names, name: str) -> None:
        self._context, self._bus, self._stream, self._name = context, bus, names.responses, name
        self._running: dict[EntryId, asyncio.Task[None]] = {}
        self._num_running: Counter[str] = Counter()
        """Running responses of each key, by name."""
        self._waiting: defaultdict[str, deque[Entry]] = defaultdict(deque)
        """Responses of each key that are taken up and do not run yet."""
        self._taken: set[EntryId] = set()
        """All of these."""

    async def run(self) -> None:
        """Take up queued responses, and now and then those that another ingress has left."""
        news = self._context.responses.news
        while True:
            news.clear()
            try:
                await self._take()
            except BusUnavailable as error:
                self._context.log.warning("bus unavailable: responses wait", error=describe(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._context.settings.lease_ttl_s):
                    await news.wait()

    async def stop(self) -> None:
        """Leave running responses to the ingress that takes them up."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    # -- taking -------------------------------------------------------------------------------------------------------
    async def _take(self) -> None:
        self._begin()
        while (room := MAX_RUNNING - len(self._running)) > 0:
            entries = await self._bus.read_group(RESPONSES_GROUP, self._name, [self._stream], count=room, block_ms=0)
            self._take_up(entries)
            if len(entries) < room:  # else more may be there, of keys that have room
                break
        others = (await self._bus.consumers(self._stream, RESPONSES_GROUP)).keys() - {self._name}
        if others:
            for dead in others - {lease.name for lease in await self._bus.leases("ingress")}:
                self._take_up(await self._bus.claim(self._stream, RESPONSES_GROUP, self._name, dead))

    def _take_up(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.id not in self._taken:
                self._taken.add(entry.id)
                self._waiting[getattr(entry.message, "owner", "")].append(entry)
        self._begin()

    def _begin(self) -> None:
        """Start as many responses as may run."""
        for owner, entries in list(self._waiting.items()):
            while entries and self._may_run(owner):
                entry = entries.popleft()
                task = self._running[entry.id] = asyncio.create_task(self._work(entry), name="response")
                self._num_running[owner] += 1
                task.add_done_callback(partial(self._ended, entry, owner))
            if not entries:
                del self._waiting[owner]

    def _may_run(self, owner: str) -> bool:
        """Whether another response of this key may run: the first of each key always, if there is room at all."""
        most = key_share(MAX_RUNNING, self._num_running, owner, alone=self._context.keys.has_one)
        return self._num_running[owner] < max(most, 1) and len(self._running) < MAX_RUNNING

    def _ended(self, entry: Entry, owner: str, _: asyncio.Task[None]) -> None:
        del self._running[entry.id]
        self._taken.discard(entry.id)
        self._num_running[owner] -= 1
        if not self._num_running[owner]:
            del self._num_running[owner]
        self._context.responses.news.set()  # there is room for another one

    async def _work(self, entry: Entry) -> None:
        """Compute a response to its end. A response that continues elsewhere may belong to an ingress that took it over
        while this one's lease had expired."""
        is_doubtful = False
        while True:
            try:
                if is_doubtful and not await self._is_ours(entry):
                    return
                if isinstance(entry.message, ResponseQueued):
                    await self._compute(entry.message.response_id, entry.deliveries)
                else:
                    await self._bus.dead_letter("ingress", entry, entry.error or "it is no response")
                return await self._bus.ack(RESPONSES_GROUP, [entry])
            except BusUnavailable as error:
                self._context.log.warning("bus unavailable: a response waits", error=describe(error))
                await asyncio.sleep(RETRY_S)
            except ApiError as error:
                self._context.log.warning("a response goes on elsewhere", error=error.message)
                is_doubtful = True
                await asyncio.sleep(ELSEWHERE_S)

    async def _is_ours(self, entry: Entry) -> bool:
        """Whether no other ingress has taken it over."""
        return (await self._bus.holders(self._stream, RESPONSES_GROUP, [entry.id])).get(entry.id) == self._name

    # -- computing ----------------------------------------------------------------------------------------------------
    async def _compute(self, response_id: str, deliveries: int) -> None:
        """Compute the events of a response that are not stored yet; then its record is final.

        Raises:
            ApiError: it has been asked for elsewhere.
        """
        responses = self._context.responses
        record = await responses.record(response_id)
        if record is None or record["response"]["status"] in OVER:
            return
        events, place, seen = ResponseEvents(record["response"]), 0, (0, 0)
        while (piece := await responses.piece(response_id, place)) is not None:
            place, seen = place + 1, piece.seen
            for event in piece.read():
                events.follow(event)
        if not events.is_over:
            async with aclosing(self._told(record, events, seen, deliveries)) as told:
                async for piece in told:
                    await responses.add(record["owner"], response_id, place, piece)
                    place += 1
        kept = {name: value for name, value in record.items() if name not in ("chat", "instructions")}
        messages = [*record["messages"], *events.messages()]
        await responses.end({**kept, "messages": messages, "response": events.response}, place)

    async def _told(
        self, record: Record, events: ResponseEvents, seen: tuple[int, int], deliveries: int
    ) -> AsyncGenerator[Piece, None]:
        """The events after those that ``events`` has followed."""
        response_id = record["response"]["id"]
        if not events.begun:
            yield Piece(written(events.begin()))
        try:
            if deliveries > MAX_DELIVERIES or await self._context.responses.is_cancelled(response_id):
                raise internal()
            key = self._key_of(record)
            parsed = of_client(parse_kept(record, self._context.model), key)
            async with self._admitted(key, parsed) as charge:
                checked = False
                async with aclosing(
                    computed(self._context, parsed, events, attempt=uuid.uuid4().hex, seen=seen)
                ) as pieces:
                    async for piece in pieces:
                        yield piece
                        if not checked and await self._context.responses.is_cancelled(response_id):
                            self._context.inbox.cancel(response_id)  # again: the first time it may not have begun
                        checked = True
                charge.settle(used_tokens(events))
        except ApiError as error:
            if error.code == ASKED_ELSEWHERE:
                raise
            cancelled = await self._context.responses.is_cancelled(response_id)
            yield Piece(written(events.failed(error, "cancelled" if cancelled else "failed")), seen)
        except BusUnavailable:
            raise
        except Exception as error:  # of ours: tried again, it would come again
            self._context.log.exception("response failed", id=response_id, error=describe(error))
            yield Piece(written(events.failed(internal(), "failed")), seen)

    def _key_of(self, record: Record) -> ApiKey:
        """The key that it came with.

        Raises:
            ApiError: it is not valid any more.
        """
        key = self._context.keys.named(record["owner"])
        if key is None:
            raise ApiError(401, "The API key of this response is not valid any more.", code="invalid_api_key")
        return key

    @contextlib.asynccontextmanager
    async def _admitted(self, key: ApiKey, parsed: ParsedRequest) -> AsyncIterator[Charge]:
        """Wait for room under the limits, in place of a client.

        Raises:
            ApiError: there will never be any.
        """
        while True:
            with contextlib.ExitStack() as room:
                try:
                    charge = room.enter_context(self._context.admission.admitted(key, parsed, self._context.model))
                except ApiError as error:
                    if error.status != 429:
                        raise
                else:
                    yield charge
                    return
            await asyncio.sleep(RETRY_S)
