"""Responses that are kept: how many bytes of them, and which go where there are too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from pagebus.bus.contract import BusUnavailable
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.storage import responses
from pagebus.web.storage.quota import KEY_BYTES, ResponseQuota
from tests.helpers.waiting import until
from tests.web.fake_backend import MODEL, Served, start_served

MIB = 2**20


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fill(shelf: ResponseQuota, owner: str, *ids: str, size: int) -> None:
    for each in ids:
        shelf.put(owner, each, size - KEY_BYTES)


def test_the_oldest_of_a_key_go() -> None:
    """As many as need be, and none of another key's; what was written last is the newest."""
    shelf = ResponseQuota(10_000, 1000, 60.0, Clock())
    fill(shelf, "b", "z", size=900)
    fill(shelf, "a", "1", "2", "3", "1", size=300)

    assert shelf.make_room("a") == []
    assert shelf.make_room("a", 300) == [("2", 0)]
    assert shelf.make_room("a", 700) == [("3", 0)]
    assert (shelf.num_bytes("a"), shelf.num_bytes("b")) == (300, 900)


def test_of_all_the_largest_keys_go() -> None:
    """A key that keeps little does not lose it to one that keeps much."""
    shelf = ResponseQuota(1000, 1000, 60.0, Clock())
    fill(shelf, "small", "s", size=300)
    fill(shelf, "large", "1", "2", size=350)

    assert shelf.has_room("small", 300) is False
    assert shelf.make_room("small", 300) == [("1", 0)]
    assert shelf.has_room("small", 300)


def test_what_is_under_way_stays() -> None:
    """Also if nothing else can make room; once it is over, its real size counts, and its events."""
    shelf = ResponseQuota(1000, 1000, 60.0, Clock())
    shelf.reserve("a", "1", 900)
    shelf.grow("a", "1", 0, 100)
    shelf.grow("a", "1", 1, 100)

    assert shelf.num_bytes("a") == 900
    assert shelf.make_room("a", 200) == []
    assert not shelf.has_room("a", 200)
    assert shelf.under_way() == [("a", "1")]
    shelf.put("a", "1", 50)
    assert shelf.num_bytes("a") == 250 + 3 * KEY_BYTES
    assert shelf.under_way() == []
    assert shelf.make_room("a", 200) == [("1", 2)]


def test_what_has_expired_counts_no_more() -> None:
    """And of who has nothing, nothing is known."""
    clock = Clock()
    shelf = ResponseQuota(1000, 1000, 60.0, clock)
    shelf.reserve("a", "1", 900)
    clock.now_s = 30.0
    shelf.reserve("b", "2", 50)
    clock.now_s = 61.0

    shelf.make_room("b")

    assert (shelf.num_bytes("a"), shelf.num_bytes("b")) == (0, 50)
    assert shelf._items.keys() == {"b"}
    assert shelf.remove("b", "2") == 0
    assert shelf.num_bytes("b") == 0


def test_without_keys_only_the_sum_counts() -> None:
    """Everybody has the same name then."""
    assert ResponseQuota(1000, 10, 60.0).limit("") == 1000
    assert ResponseQuota(1000, 10, 60.0).limit("a") == 10


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    """A server with the keys ``one`` and ``two``; the client has the first."""
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), api_key=("one", "two"), **settings)
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="one", max_retries=0) as client:
        yield served, client
    await served.stop()


def states(served: Served) -> set[str]:
    """The kinds of what lies of responses on the bus."""
    names = (name.partition(":state:")[2] for name in served.backend.bus.server.states)
    return {name.partition(":")[0] for name in names if name.startswith("response")}


async def is_there(client: openai.AsyncOpenAI, response_id: str) -> bool:
    try:
        return (await client.responses.retrieve(response_id)).id == response_id
    except openai.NotFoundError:
        return False


async def test_older_ones_make_room() -> None:
    """A client that asks for more than is kept gets all answers, and the newest of them again; another key loses
    nothing."""
    async with serving(max_responses_bytes_per_key=MIB) as (_, client):
        other = client.with_options(api_key="two")
        asked = {"model": MODEL.name, "input": "x" * 300_000}
        theirs = await other.responses.create(**asked)
        mine = [(await client.responses.create(**asked)).id for _ in range(3)]

        assert [await is_there(client, each) for each in mine] == [False, False, True]
        assert await is_there(other, theirs.id)


async def test_too_much_under_way() -> None:
    """Background responses that wait fill the room of their key: a 429 until one has gone. One that can never be kept
    is a 400."""
    async with serving(max_responses_bytes_per_key=MIB, answers=False) as (served, client):
        asked: dict[str, Any] = {"model": MODEL.name, "input": "x" * 300_000, "background": True}
        with pytest.raises(openai.BadRequestError, match="at most 1048576 are kept"):
            await client.responses.create(**asked)
        asked["max_output_tokens"] = 8
        first = await client.responses.create(**asked)
        with pytest.raises(openai.RateLimitError, match="bytes of responses") as caught:
            await client.responses.create(**asked)
        assert int(caught.value.response.headers["retry-after"]) > 0
        await client.with_options(api_key="two").responses.create(**asked)
        await client.responses.delete(first.id)
        await client.responses.create(**asked)
        assert len(served.backend.requests) <= 3


async def test_what_another_ingress_has_ended_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts there, and here no more, once somebody needs the room."""
    monkeypatch.setattr(responses, "REFRESH_S", 0.0)
    async with serving(max_responses_bytes_per_key=MIB) as (served, client):
        assert served.actor.context is not None
        shelf = served.actor.context.responses._quota
        shelf.reserve("key 0", "resp_computed_elsewhere", MIB)

        await client.responses.create(model=MODEL.name, input="x", background=True, max_output_tokens=8)

        assert shelf.num_bytes("key 0") < MIB


async def test_nothing_is_left_of_a_deleted_response() -> None:
    """Not its events either, nor what says that it is under way."""
    async with serving() as (served, client):
        stream = await client.responses.create(model=MODEL.name, input="x", background=True, stream=True)
        *_, last = [event async for event in stream]
        await until(lambda: states(served) == {"response", "response-events"})
        await client.responses.delete(last.response.id)

        assert states(served) == set()


async def test_a_conversation_has_an_end() -> None:
    """What is kept does not grow beyond what could be sent."""
    async with serving() as (served, client):
        assert served.actor.context is not None
        served.actor.context.bodies.max_bytes = 10_000
        asked = {"model": MODEL.name, "input": "x" * 6_000}
        first = await client.responses.create(**asked)
        with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
            await client.responses.create(**asked, previous_response_id=first.id)
        assert caught.value.param == "previous_response_id"


async def test_the_bus_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 503; a stream that has begun is broken off, no other response is written into it, and it counts as an error of
    ours."""
    async with serving() as (served, client):
        assert served.actor.context is not None
        found, looks = served.actor.context.responses, 0
        made = await client.responses.create(model=MODEL.name, input="x", background=True)
        await until(lambda: "response-under-way" not in states(served))
        piece = found.piece

        async def fail_later(response_id: str, place: int) -> responses.Piece | None:
            nonlocal looks
            looks += 1
            if looks > 1:
                raise BusUnavailable("away")
            return await piece(response_id, place)

        monkeypatch.setattr(found, "piece", fail_later)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.actor.port)
        head = f"GET /v1/responses/{made.id}?stream=true HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\n\r\n"
        writer.write(head.encode())
        told = await reader.read()
        writer.close()
        assert (told.count(b"HTTP/1.1"), b"response.created" in told, looks) == (1, True, 2)
        counted = {labels["status"]: data["value"] for name, labels, data in served.actor.metrics.snapshot()["series"]
                   if name == "pagebus:errors"}  # fmt: skip
        assert counted == {"503": 1}

        async def fail(*names: str) -> None:
            raise BusUnavailable("away")

        monkeypatch.setattr(found, "record", fail)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.responses.retrieve(made.id)
        assert caught.value.status_code == 503
