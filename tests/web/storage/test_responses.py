"""When responses expire, by a clock of the test."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.streams import Names
from pagebus.web.adapters.translated import named
from pagebus.web.storage import responses as storage
from pagebus.web.storage.quota import ResponseQuota
from pagebus.web.storage.responses import Piece, Responses

TTL_S = 100.0


class World:
    """Responses, and the time of their bus."""

    def __init__(self) -> None:
        self.now_s = 0.0
        bus = MemoryBus(MemoryServer(lambda: self.now_s))
        quota = ResponseQuota(2**20, 2**20, TTL_S, clock=lambda: self.now_s)
        self.responses = Responses(bus, Names(), TTL_S, quota)

    async def events(self, after: int = -1) -> list[dict[str, Any]]:
        found = [data async for data in self.responses.events("r", after)]
        return [orjson.loads(data.partition(b"data: ")[2]) for data in found]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(storage, "POLL_S", 0.001)
    return World()


def record(status: str) -> dict[str, Any]:
    return {"owner": "", "response": {"id": "r", "status": status, "background": True}, "items": [], "messages": []}


def piece(number: int, kind: str = "output_text.delta") -> Piece:
    return Piece(named({"type": f"response.{kind}", "sequence_number": number}))


async def test_a_response_under_way_stays(world: World) -> None:
    """However long it waits and is computed; once it is over it expires."""
    await world.responses.queue(record("queued"))
    await world.responses.cancel("r")
    world.now_s = 5 * TTL_S
    assert await world.responses.find("r", "") is not None
    assert await world.responses.is_cancelled("r")
    await world.responses.end(record("completed"), 0)
    world.now_s += TTL_S - 1
    assert await world.responses.find("r", "") is not None
    world.now_s += 1
    assert await world.responses.find("r", "") is None


@pytest.mark.parametrize("after", [-1, 0, 7])
async def test_a_stream_whose_events_have_expired_has_an_end(world: World, after: int) -> None:
    """Its last event is made of the record: a reader is not left without one."""
    await world.responses.queue(record("queued"))
    await world.responses.add("", "r", 0, piece(0))
    world.now_s = TTL_S - 1
    await world.responses.add("", "r", 1, piece(1, "completed"))
    await world.responses.end(record("completed"), 2)
    assert [event["type"] for event in await world.events()] == ["response.output_text.delta", "response.completed"]
    world.now_s = TTL_S
    assert await world.events(after) == [
        {"type": "response.completed", "sequence_number": after + 1, "response": record("completed")["response"]}
    ]
