"""Background responses whose ingress dies, or makes a mistake."""

from __future__ import annotations

import asyncio

import openai
import pytest

from pagebus.actors.settings import Settings
from pagebus.bus.contract import BusUnavailable
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.app import IngressActor
from pagebus.web.storage.responses import Piece
from tests.helpers.waiting import LIMIT_S, until, until_empty
from tests.web.fake_backend import MODEL, SENTENCE, batch, speak, start_served

TEXT = "".join(SENTENCE)


async def test_an_error_of_ours_fails_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client does not wait for ever, and it is not taken up again."""
    server = MemoryServer()
    monkeypatch.setattr("pagebus.web.routes.generate.background.parse_kept", lambda *_: {}["messages"])
    served = await start_served(lambda: MemoryBus(server))
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.responses.create(model=MODEL.name, input="x", background=True, stream=True)
        async with asyncio.timeout(LIMIT_S):
            *_, last = [event async for event in stream]
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")
    await until_empty(served.backend.bus, served.backend.names.responses)
    await served.stop()


async def test_a_request_goes_on_while_its_events_cannot_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler keeps it for the next attempt, from its first token to its end, however late the bus goes away."""
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), answers=False)
    responses = served.actor.context.responses
    store, failing = responses.add, [b"response.output_text.delta", b"response.completed"]

    async def add(owner: str, response_id: str, place: int, piece: Piece) -> None:
        if failing and failing[0] in piece.events:
            del failing[0]
            raise BusUnavailable("away")
        await store(owner, response_id, place, piece)

    monkeypatch.setattr(responses, "add", add)
    monkeypatch.setattr("pagebus.web.routes.generate.background.RETRY_S", 0.01)
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.responses.create(model=MODEL.name, input="x", background=True, stream=True)
        (first,) = await served.backend.requested(1)
        row = speak(first, 0)
        await served.backend.send(first.ingress, batch(row[:1]))
        _, second = await served.backend.requested(2)
        assert await served.backend.aborted(1) == served.backend.left == [first.request_id]
        await served.backend._answer(second)
        *_, third = await served.backend.requested(3)
        assert not served.backend.done
        await served.backend._answer(third)
        events = [event async for event in stream]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    await until(lambda: served.backend.done == [first.request_id])
    await served.stop()


async def test_a_background_response_outlives_its_ingress() -> None:
    """Another one joins the request where it is, and tells the events that come after those that have been told; the
    client sees no seam."""
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), answers=False)
    settings = Settings(port=0, drain_timeout_s=0.05, lease_ttl_s=60.0)
    other = IngressActor(settings, MemoryBus(server), "ingress-1", model=MODEL)
    running = asyncio.create_task(other.run())
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.responses.create(model=MODEL.name, input="x", background=True, stream=True)
        (first,) = await served.backend.requested(1)
        row = speak(first, 0)
        for delta in row[:2]:
            await served.backend.send(first.ingress, batch([delta]))
        told = [await anext(stream) for _ in range(5)]  # to the first text
        await served.actor.bus.close()  # as kill -9: nothing is sent any more
        served.running.cancel()
        await asyncio.gather(served.running, return_exceptions=True)
        await stream.close()
    del server.leases[other.names.lease("ingress", served.actor.lease_name())]
    other.context.responses.news.set()  # as after the time of a lease
    _, second = await served.backend.requested(2)
    assert (second.request_id, second.messages) == (first.request_id, first.messages)
    assert second.attempt != first.attempt
    assert not second.shared, "its events have one writer"
    assert second.ingress.startswith("ingress-1@")
    for delta in row:
        await served.backend.send(second.ingress, batch([delta]))
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{other.port}/v1", api_key="x", max_retries=0) as client:
        response_id = first.request_id
        after = told[-1].sequence_number
        told += [
            event async for event in await client.responses.retrieve(response_id, stream=True, starting_after=after)
        ]
        assert (await client.responses.retrieve(response_id)).output_text == TEXT
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert "".join(event.delta for event in told if event.type == "response.output_text.delta") == TEXT
    assert told[-1].response.output_text == TEXT
    await until_empty(served.backend.bus, served.backend.names.responses)
    other.request_drain()
    await running
    await other.bus.close()
    await served.backend.stop()
