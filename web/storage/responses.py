"""Stored responses: kept on the bus for a limited time, so that any ingress can show and continue them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, cast

import orjson

from pagebus.bus.contract import Bus
from pagebus.bus.messages import ResponseQueued
from pagebus.bus.streams import Names
from pagebus.web.adapters.response_events import OVER
from pagebus.web.adapters.translated import Event, named
from pagebus.web.http.errors import ApiError, overloaded
from pagebus.web.http.limits import UNSTATED_OUTPUT_TOKENS
from pagebus.web.storage.quota import ResponseQuota

POLL_S = 0.05
"""Seconds between polls for further events of a background response; more, up to ``MAX_POLL_S``, while there are
none."""
MAX_POLL_S = 0.5
GONE_POLLS = 20
"""Number of empty polls after which the existence of the response is checked."""
EVENT_BYTES = 512
"""Bytes on the bus per token of a background response: its event and the event's key."""
FULL_RETRY_S = 10
"""Seconds after which a client may retry when responses under way fill the quota."""
REFRESH_S = 1.0
"""Seconds between checks for responses that other ingresses have ended."""
DELETE_COUNT = 1000
"""Number of Redis keys deleted in one command."""
UNDER_WAY_S = 86400.0
"""Seconds for which a background response may wait and be computed; it expires ``ttl_s`` after its end."""
UNDER_WAY = "response-under-way"
"""Name of the mark that exists until a background response is over."""
Record = dict[str, Any]
"""``response``; ``items``, its input; ``messages``, the whole conversation as a chat; ``owner``, the name of the key.
Of one from the background also ``pieces``, how many its events are in; while it is under way ``chat``, the rest of what
is asked for, and its ``instructions``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some events of a background response, and how much of the output (tokens, characters) its client has after
    them."""

    events: bytes
    seen: tuple[int, int] = (0, 0)

    def written(self) -> list[bytes]:
        """One by one."""
        return [event + b"\n\n" for event in self.events.split(b"\n\n")[:-1]]

    def read(self) -> list[Event]:
        return [orjson.loads(event.partition(b"data: ")[2]) for event in self.written()]


def num_bytes(value: Any) -> int:
    """As it is written."""
    return len(orjson.dumps(value))


class Responses:
    """Records of responses, and events of background responses in pieces. All expire ``ttl_s`` after they were written,
    records of responses under way UNDER_WAY_S later. They count towards the quota."""

    def __init__(self, bus: Bus, names: Names, ttl_s: float, quota: ResponseQuota) -> None:
        self._bus, self._names, self._ttl_s, self._quota = bus, names, ttl_s, quota
        self._next_refresh_s = 0.0
        self.news = asyncio.Event()
        """Set when a response has been queued here."""

    async def keep(self, record: Record) -> None:
        """Store a finished response, deleting older ones if there is no room."""
        owner, response_id = record["owner"], record["response"]["id"]
        self._quota.put(owner, response_id, num_bytes(record))
        await self._put(record, self._ttl_s)
        for other, pieces in self._quota.make_room(owner):
            await self._forget(other, pieces)

    async def _put(self, record: Record, ttl_s: float) -> None:
        await self._bus.put_state(f"response:{record['response']['id']}", record, ttl_s=ttl_s)

    async def record(self, response_id: str) -> Record | None:
        """The record, whoever its owner is."""
        (found,) = await self._bus.get_state(f"response:{response_id}")
        return None if found is None else cast(Record, dict(found))

    async def find(self, response_id: str, owner: str) -> Record | None:
        """The record, if there is one of this owner."""
        found = await self.record(response_id)
        return found if found is not None and found["owner"] == owner else None

    async def delete(self, record: Record, pieces: int = 0) -> None:
        """Delete a response with so many pieces of events."""
        response_id = record["response"]["id"]
        known = self._quota.remove(record["owner"], response_id)
        await self._forget(response_id, max(known, pieces, record.get("pieces", 0)))

    async def _forget(self, response_id: str, pieces: int) -> None:
        await self._bus.delete_state(*(f"{each}:{response_id}" for each in ("response", "response-cancel", UNDER_WAY)))
        events = [f"response-events:{response_id}:{place}" for place in range(pieces)]
        for start in range(0, pieces, DELETE_COUNT):
            await self._bus.delete_state(*events[start : start + DELETE_COUNT])

    # -- in the background --------------------------------------------------------------------------------------------
    async def reserve(self, record: Record, output_tokens: int | None) -> None:
        """Reserve room for a background response of at most so many tokens.

        Raises:
            ApiError: 429, others that are under way fill it; 400, there never is.
        """
        output_tokens = min(output_tokens or UNSTATED_OUTPUT_TOKENS, UNSTATED_OUTPUT_TOKENS)  # more counts as it comes
        owner, wanted = record["owner"], num_bytes(record) + output_tokens * EVENT_BYTES
        if wanted > (limit := self._quota.limit(owner)):
            text = f"The response may need {wanted} bytes; at most {limit} are kept."
            raise ApiError(400, text, code="too_many_bytes")
        for other, pieces in self._quota.make_room(owner, wanted):
            await self._forget(other, pieces)
        if not self._quota.has_room(owner, wanted):
            await self._refresh()
        if not self._quota.has_room(owner, wanted):
            raise overloaded("bytes of responses", limit, FULL_RETRY_S)
        self._quota.reserve(owner, record["response"]["id"], wanted)

    async def _refresh(self) -> None:
        """Count responses that were queued here and computed by other ingresses."""
        if time.monotonic() >= self._next_refresh_s and (names := self._quota.under_way()):
            self._next_refresh_s = time.monotonic() + REFRESH_S
            found = await self._bus.get_state(*(f"{UNDER_WAY}:{response_id}" for _, response_id in names))
            for name, mark in zip(names, found, strict=True):
                if mark is None:
                    self._quota.remove(*name)

    async def queue(self, record: Record) -> None:
        """Queue a response for any ingress to compute. Its room is reserved already."""
        response_id, owner, ttl_s = record["response"]["id"], record["owner"], self._ttl_s + UNDER_WAY_S
        await self._bus.put_state(f"{UNDER_WAY}:{response_id}", {}, ttl_s=ttl_s)
        await self._put(record, ttl_s)
        await self._bus.publish([(self._names.responses, ResponseQueued(response_id=response_id, owner=owner))])
        self.news.set()

    async def end(self, record: Record, pieces: int) -> None:
        """Store a finished background response; if it was deleted meanwhile, delete what was added since."""
        response_id = record["response"]["id"]
        if await self.record(response_id) is None:
            return await self.delete(record, pieces)
        await self.keep({**record, "pieces": pieces})
        await self._bus.delete_state(f"{UNDER_WAY}:{response_id}")

    async def add(self, owner: str, response_id: str, place: int, piece: Piece) -> None:
        """Store the ``place``-th piece of events."""
        self._quota.grow(owner, response_id, place, len(piece.events))
        told = {"events": piece.events.decode(), "seen": list(piece.seen)}
        await self._bus.put_state(f"response-events:{response_id}:{place}", told, ttl_s=self._ttl_s)

    async def piece(self, response_id: str, place: int) -> Piece | None:
        (found,) = await self._bus.get_state(f"response-events:{response_id}:{place}")
        if found is None:
            return None
        tokens, chars = cast(list[int], found["seen"])
        return Piece(str(found["events"]).encode(), (tokens, chars))

    async def events(self, response_id: str, after: int) -> AsyncGenerator[bytes, None]:
        """All events with a higher number, as they come, and the last one in any case, so that every stream has an end
        (unless the response is deleted). Where events have expired, that is made of the record."""
        place = waited = 0
        while True:
            if (piece := await self.piece(response_id, place)) is None:
                waited += 1
                if waited % GONE_POLLS == 0:
                    if (record := await self.record(response_id)) is None:
                        return
                    if (end := await self._end_of(record, place)) is not None:
                        yield named(end | {"sequence_number": after + 1})
                        return
                await asyncio.sleep(min(POLL_S * (1 + waited / GONE_POLLS), MAX_POLL_S))
                continue
            place, waited = place + 1, 0
            for event, data in zip(piece.read(), piece.written(), strict=True):
                is_last = event["type"].removeprefix("response.") in OVER
                if is_last:
                    await self._recorded(response_id)
                if event["sequence_number"] > after or is_last:
                    after = event["sequence_number"]
                    yield data
                if is_last:
                    return

    async def _end_of(self, record: Record, place: int) -> Event | None:
        """The last event of a response that is over, and of whose events this piece has expired."""
        response = record["response"]
        if response["status"] not in OVER or await self.piece(response["id"], place) is not None:
            return None
        return {"type": f"response.{response['status']}", "response": response}

    async def _recorded(self, response_id: str) -> None:
        """Wait until the record is final. It is written after the last event, and a client that has seen that may ask
        for it."""
        while True:
            record = await self.record(response_id)
            if record is None or record["response"]["status"] in OVER:
                return
            await asyncio.sleep(POLL_S)

    async def cancel(self, response_id: str) -> None:
        """Note that the client has cancelled it."""
        await self._bus.put_state(
            f"response-cancel:{response_id}", {"cancelled": True}, ttl_s=self._ttl_s + UNDER_WAY_S
        )

    async def is_cancelled(self, response_id: str) -> bool:
        (found,) = await self._bus.get_state(f"response-cancel:{response_id}")
        return found is not None
