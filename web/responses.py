"""Responses that are kept: on the bus, for a while, so that any ingress can show them and go on from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, cast

import orjson

from bus.contract import Bus
from web.membership import Membership
from web.shapes.translated import named

POLL_S = 0.05
"""How often it is looked for further events of a response that is computed in the background."""
GONE_POLLS = 20
"""After so many looks without any it is asked whether its ingress lives."""
Record = dict[str, Any]
"""``response``; ``items``, its input; ``messages``, the whole conversation as a chat; ``owner``, the key; ``address``,
the ingress that computes it."""


class Responses:
    """Records, and the events of background responses in pieces, each kept for ``ttl_s``."""

    def __init__(self, bus: Bus, membership: Membership, address: str, ttl_s: float) -> None:
        self._bus, self._membership, self._address, self._ttl_s = bus, membership, address, ttl_s
        self._tasks: set[asyncio.Task[None]] = set()

    async def keep(self, record: Record) -> None:
        name = f"response:{record['response']['id']}"
        await self._bus.put_state(name, {**record, "address": self._address}, ttl_s=self._ttl_s)

    async def find(self, response_id: str, owner: str) -> Record | None:
        """The record, if there is one of this owner. What its ingress left behind by dying has failed."""
        (found,) = await self._bus.get_state(f"response:{response_id}")
        if found is None or found["owner"] != owner:
            return None
        record = cast(Record, dict(found))
        response = record["response"]
        if response["status"] in ("queued", "in_progress") and not self._lives(str(record["address"])):
            error = {"code": "server_error", "message": "The server that computed this is gone."}
            record["response"] = {**response, "status": "failed", "error": error}
        return record

    def _lives(self, address: str) -> bool:
        name, _, epoch = address.rpartition("@")
        leases = self._membership.leases
        return any(lease.name == name and str(lease.epoch) == epoch for lease in leases) or address == self._address

    async def delete(self, response_id: str) -> None:
        await self._bus.delete_state(f"response:{response_id}", f"response-cancel:{response_id}")

    # -- in the background --------------------------------------------------------------------------------------------
    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Compute a response although its client does not wait."""
        task = asyncio.create_task(work, name="response")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """End what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def add_events(self, response_id: str, piece: int, events: bytes) -> None:
        """Keep some events, the ``piece``-th ones."""
        await self._bus.put_state(
            f"response-events:{response_id}:{piece}", {"events": events.decode()}, ttl_s=self._ttl_s
        )

    async def events(self, response_id: str, owner: str, after: int) -> AsyncIterator[bytes]:
        """All events with a higher number, as they come, until the last one."""
        piece = waited = 0
        number = -1
        while True:
            (found,) = await self._bus.get_state(f"response-events:{response_id}:{piece}")
            if found is not None:
                piece, waited = piece + 1, 0
                for event in str(found["events"]).encode().split(b"\n\n")[:-1]:
                    number, is_last = _place(event)
                    if number > after:
                        yield event + b"\n\n"
                    if is_last:
                        return
                continue
            waited += 1
            if waited % GONE_POLLS == 0:
                record = await self.find(response_id, owner)
                if record is None:
                    return
                if record["response"]["status"] == "failed":
                    failed = {"type": "response.failed", "sequence_number": number + 1, "response": record["response"]}
                    yield named(failed)
                    return
            await asyncio.sleep(POLL_S)

    async def cancel(self, response_id: str) -> None:
        """Note that the client wants no more of it."""
        await self._bus.put_state(f"response-cancel:{response_id}", {"cancelled": True}, ttl_s=self._ttl_s)

    async def is_cancelled(self, response_id: str) -> bool:
        (found,) = await self._bus.get_state(f"response-cancel:{response_id}")
        return found is not None


def _place(event: bytes) -> tuple[int, bool]:
    """Number of an event, and whether none follows."""
    data: Mapping[str, Any] = orjson.loads(event.partition(b"data: ")[2])
    over = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
    return data["sequence_number"], data["type"] in over
