"""Responses that are kept: on the bus, for a while, so that any ingress can show them and go on from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import orjson

from bus.contract import Bus
from bus.messages import ResponseQueued
from bus.streams import Names
from web.shapes.response_events import OVER
from web.shapes.translated import Event

POLL_S = 0.05
"""How often it is looked for further events of a response that is computed in the background."""
GONE_POLLS = 20
"""After so many looks without any it is asked whether it has been deleted."""
Record = dict[str, Any]
"""``response``; ``items``, its input; ``messages``, the whole conversation as a chat; ``owner``, the name of the key.
Of one that is under way in the background also ``chat``, the rest of what is asked for, and its ``instructions``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some events of a background response as they are written, and how much of the output (tokens, characters) its
    client has after them."""

    events: bytes
    seen: tuple[int, int] = (0, 0)

    def written(self) -> list[bytes]:
        """One by one."""
        return [event + b"\n\n" for event in self.events.split(b"\n\n")[:-1]]

    def read(self) -> list[Event]:
        return [orjson.loads(event.partition(b"data: ")[2]) for event in self.written()]


class Responses:
    """Records, and the events of background responses in pieces, each kept for ``ttl_s``."""

    def __init__(self, bus: Bus, names: Names, ttl_s: float) -> None:
        self._bus, self._names, self._ttl_s = bus, names, ttl_s
        self.news = asyncio.Event()
        """Something has been queued here."""

    async def keep(self, record: Record) -> None:
        await self._bus.put_state(f"response:{record['response']['id']}", record, ttl_s=self._ttl_s)

    async def record(self, response_id: str) -> Record | None:
        """The record, whose ever it is."""
        (found,) = await self._bus.get_state(f"response:{response_id}")
        return None if found is None else cast(Record, dict(found))

    async def find(self, response_id: str, owner: str) -> Record | None:
        """The record, if there is one of this owner."""
        found = await self.record(response_id)
        return found if found is not None and found["owner"] == owner else None

    async def delete(self, response_id: str) -> None:
        await self._bus.delete_state(f"response:{response_id}", f"response-cancel:{response_id}")

    # -- in the background --------------------------------------------------------------------------------------------
    async def queue(self, record: Record) -> None:
        """Have an ingress compute it, whether or not its client waits."""
        await self.keep(record)
        await self._bus.publish([(self._names.responses, ResponseQueued(response_id=record["response"]["id"]))])
        self.news.set()

    async def add(self, response_id: str, place: int, piece: Piece) -> None:
        """Keep some events, the ``place``-th ones."""
        told = {"events": piece.events.decode(), "seen": list(piece.seen)}
        await self._bus.put_state(f"response-events:{response_id}:{place}", told, ttl_s=self._ttl_s)

    async def piece(self, response_id: str, place: int) -> Piece | None:
        (found,) = await self._bus.get_state(f"response-events:{response_id}:{place}")
        if found is None:
            return None
        tokens, chars = cast(list[int], found["seen"])
        return Piece(str(found["events"]).encode(), (tokens, chars))

    async def events(self, response_id: str, after: int) -> AsyncIterator[bytes]:
        """All events with a higher number, as they come, until the last one (or until the response is deleted)."""
        place = waited = 0
        while True:
            if (piece := await self.piece(response_id, place)) is None:
                waited += 1
                if waited % GONE_POLLS == 0 and await self.record(response_id) is None:
                    return
                await asyncio.sleep(POLL_S)
                continue
            place, waited = place + 1, 0
            for event, data in zip(piece.read(), piece.written(), strict=True):
                is_last = event["type"].removeprefix("response.") in OVER
                if is_last:
                    await self._recorded(response_id)
                if event["sequence_number"] > after:
                    yield data
                if is_last:
                    return

    async def _recorded(self, response_id: str) -> None:
        """Wait until the record has the end too, which comes after the events: who saw them may ask for it."""
        while True:
            record = await self.record(response_id)
            if record is None or record["response"]["status"] in OVER:
                return
            await asyncio.sleep(POLL_S)

    async def cancel(self, response_id: str) -> None:
        """Note that the client wants no more of it."""
        await self._bus.put_state(f"response-cancel:{response_id}", {"cancelled": True}, ttl_s=self._ttl_s)

    async def is_cancelled(self, response_id: str) -> bool:
        (found,) = await self._bus.get_state(f"response-cancel:{response_id}")
        return found is not None
