"""The load generator's client against a small server whose streams are written by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from pagebus.actors.bench.driver.client import Outcome, run_calls, send, share_of
from pagebus.actors.bench.driver.deployment import BenchError
from pagebus.actors.bench.driver.load import Call, Spec
from pagebus.actors.bench.serve import served_model

TOKEN = 'data: {"choices":[{"index":0,"text":" word"}],"usage":null}\n\n'
USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE = "data: [DONE]\n\n"
EMPTY_COUNTED = 'data: {"choices":[{"index":0,"text":""}],"usage":{"prompt_tokens":7,"completion_tokens":%d}}\n\n'
ROLE = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CHAT = 'data: {"choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
FINISH = 'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
ERROR = 'data: {"error":{"message":"out of memory"}}\n\n'


class Server:
    """Answers every POST with ``parts``, each written by itself; counts how many calls are open."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.status = 200
        self.open = self.most = self.seen = 0
        self.bodies: list[dict[str, object]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.open += 1
        self.most = max(self.most, self.open)
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        response = web.StreamResponse()
        await response.prepare(request)
        for part in self.parts:
            await response.write(part.encode())
            await asyncio.sleep(0)
        await response.write_eof()
        self.open -= 1
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    """A running server and its URL."""
    handler = Server()
    app = web.Application()
    app.router.add_post("/v1/completions", handler.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield handler, f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def ask(server: tuple[Server, str], *parts: str) -> Outcome:
    """One call that is answered with these parts."""
    server[0].parts = list(parts)
    async with aiohttp.ClientSession() as session:
        return await send(session, f"{server[1]}/v1/completions", Call(3, b"{}", 0.0, 5))


async def test_tokens_are_counted_by_usage(server: tuple[Server, str]) -> None:
    """The number of tokens is what the server says; the times are those of events with text."""
    outcome = await ask(server, TOKEN, TOKEN + TOKEN, USAGE, DONE)
    assert (outcome.number, outcome.error) == (3, "")
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 5)
    assert len(outcome.gaps_s) == 2
    assert outcome.sent_s <= outcome.first_s <= outcome.last_s
    assert sum(outcome.gaps_s) == pytest.approx(outcome.last_s - outcome.first_s)


async def test_tokens_are_counted_by_events_without_usage(server: tuple[Server, str]) -> None:
    """A server that reports no usage is believed to send a token an event."""
    assert (await ask(server, TOKEN, TOKEN, DONE)).output_tokens == 2


async def test_events_may_be_cut_anywhere(server: tuple[Server, str]) -> None:
    """Parts of events are put together, whatever pieces they come in."""
    text = TOKEN + TOKEN + USAGE + DONE
    outcome = await ask(server, *(text[at : at + 7] for at in range(0, len(text), 7)))
    assert (outcome.error, outcome.output_tokens, len(outcome.gaps_s)) == ("", 5, 1)


async def test_a_token_without_text_counts_if_usage_grows(server: tuple[Server, str]) -> None:
    """With usage in every event, tokens that are no text have their times too."""
    outcome = await ask(server, EMPTY_COUNTED % 1, EMPTY_COUNTED % 2, EMPTY_COUNTED % 2, DONE)
    assert (outcome.output_tokens, len(outcome.gaps_s)) == (2, 1)


async def test_the_role_of_a_chat_is_no_token(server: tuple[Server, str]) -> None:
    """The first event of a chat and the last one bring no token."""
    outcome = await ask(server, ROLE, CHAT, CHAT, FINISH, DONE)
    assert (outcome.error, outcome.output_tokens, len(outcome.gaps_s)) == ("", 2, 1)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ((TOKEN,), "the stream ended without [DONE]"),
        ((DONE,), "the stream held no token"),
        ((TOKEN, ERROR, DONE), "{'message': 'out of memory'}"),
    ],
)
async def test_broken_streams_are_failures(server: tuple[Server, str], parts: tuple[str, ...], error: str) -> None:
    """A stream that ends early, holds nothing or tells of an error is no success."""
    assert (await ask(server, *parts)).error == error


async def test_refusals_are_failures(server: tuple[Server, str]) -> None:
    """Another status than 200 is told with what the server said."""
    server[0].status = 429
    assert (await ask(server)).error == "status 429: no"


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    """Nobody listens: the call fails, the benchmark goes on."""
    async with aiohttp.ClientSession() as session:
        outcome = await send(session, "http://127.0.0.1:9/v1/completions", Call(0, b"{}", 0.0, 1))
    assert outcome.error.startswith("ClientConnectorError")


async def test_no_more_calls_at_a_time_than_allowed(server: tuple[Server, str]) -> None:
    """The limit holds, and every call is made."""
    handler, url = server
    handler.parts = [TOKEN, DONE]
    spec = Spec(base_url=url, backend="openai", endpoint="", model="m", workload="chat")
    outcomes: list[Outcome] = []
    calls = [Call(number, b"{}", 0.0, 1) for number in range(12)]
    await run_calls(spec, calls, time.time(), outcomes.append, 3)
    assert handler.most <= 3
    assert sorted(outcome.number for outcome in outcomes) == list(range(12))


def test_processes_share_the_calls_at_a_time() -> None:
    """Together the parts have just as many calls at a time as one process would."""
    assert [share_of(10, part, 4) for part in range(4)] == [3, 3, 2, 2]
    assert [share_of(0, part, 4) for part in range(4)] == [0] * 4


async def test_a_server_that_lists_no_models(server: tuple[Server, str]) -> None:
    """What it answered is told: of an address that ends in /v1, for example."""
    spec = Spec(base_url=server[1] + "/v1", backend="openai", endpoint="", model="", workload="chat", requests=1)
    with pytest.raises(BenchError, match="/v1/v1/models: status 404: 404: Not Found"):
        await served_model(spec)
