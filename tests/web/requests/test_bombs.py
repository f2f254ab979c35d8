"""A victim beside each of the requests that take long to handle: what is long is done beside the loop, or in short
parts, and what can never be answered does not reach the bus."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson
import pytest

from pagebus.actors.model.token_bits import from_bits
from pagebus.bus.codec import encode
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import GenerateRequest, Message
from pagebus.bus.outbox import BATCH_BYTES
from pagebus.web.http.limits import LONG_BODY_BYTES
from pagebus.web.requests.openai import parse_json
from tests.web.fake_backend import MODEL, SENTENCE, Served, start_served

VOCAB = 50_000
MAX_CHARS = 600_000
SHORT: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
LONG_TEXT = "word " * 80_000
HOPELESS = "word " * 200_000
ALL_TOKENS = list(range(VOCAB))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Watched(MemoryBus):
    """A bus that notes how long what it is given at once is."""

    server: MemoryServer
    published: list[list[Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.server)

    async def publish(self, items: Iterable[tuple[str, Message]]) -> None:
        listed = list(items)
        self.published.append([message for _, message in listed])
        await super().publish(listed)

    def lengths(self) -> list[list[int]]:
        """Bytes of the requests of each batch."""
        return [
            [sum(map(len, encode(each).values())) for each in batch if isinstance(each, GenerateRequest)]
            for batch in self.published
        ]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = MemoryServer()
    model = replace(MODEL, vocab_size=VOCAB, max_model_len=200_000)
    started = await start_served(lambda: Watched(server), model)
    await started.backend.leave("tokenizer")
    await started.backend.join("tokenizer", max_prompt_chars=MAX_CHARS)
    await started.refresh()
    yield started
    await started.stop()


@pytest.mark.parametrize(
    ("path", "bomb", "count", "status"),
    [
        (COMPLETIONS, SHORT | {"allowed_token_ids": [7] * 200_000}, 4, 400),
        (COMPLETIONS, SHORT | {"allowed_token_ids": ALL_TOKENS}, 4, 200),
        (COMPLETIONS, SHORT | {"prompt": HOPELESS}, 8, 400),
        (COMPLETIONS, SHORT | {"prompt": LONG_TEXT}, 12, 200),
        (COMPLETIONS, SHORT | {"prompt": HOPELESS, "truncate_prompt_tokens": 9}, 2, 400),
        (COMPLETIONS, SHORT | {"prompt": ["x"] * 1024}, 2, 200),
        (CHAT, {"messages": [{"role": "user", "content": HOPELESS}]}, 8, 400),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 4096, "max_tokens": 1}, 2, 200),
        ("/v1/embeddings", {"input": HOPELESS}, 4, 400),
        ("/v1/responses", {"input": HOPELESS}, 4, 400),
        (COMPLETIONS, SHORT | {"metadata": {"x": [[]] * 200_000}}, 4, 400),
        (COMPLETIONS, SHORT | {"bad_words": ["never " * 160] * 128}, 4, 200),
        (COMPLETIONS, SHORT | {"n": 64, "logprobs": 20}, 4, 200),
        (COMPLETIONS, SHORT | {"structured_outputs": {"json": {"enum": ["12345678"] * 20_000}}}, 4, 400),
    ],
    ids=lambda value: "",
)
async def test_a_victim_beside_a_bomb(
    served: Served, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch,
    path: str, bomb: dict[str, Any], count: int, status: int,
) -> None:  # fmt: skip
    """The victim has its answer, and each bomb what is due. No long body is read on the loop, and no batch for the bus
    is longer than may be, but for its last message."""
    on_loop: list[int] = []

    def watched(body: bytes) -> dict[str, Any]:
        if threading.current_thread() is threading.main_thread():
            on_loop.append(len(body))
        return parse_json(body)

    monkeypatch.setattr("pagebus.web.access.bodies.parse_json", watched)
    bus = served.actor.bus
    assert isinstance(bus, Watched)

    async def post(path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        data = await asyncio.to_thread(orjson.dumps, body)
        async with http.post(served.url + path, data=data) as response:
            return response.status, await response.read()

    *bombs, victim = await asyncio.gather(*[post(path, bomb) for _ in range(count)], post(COMPLETIONS, {"prompt": "x"}))
    assert [code for code, _ in bombs] == [status] * count, bombs[0][1][:300]
    assert orjson.loads(victim[1])["choices"][0]["text"] == "".join(SENTENCE)
    assert max(on_loop, default=0) <= LONG_BODY_BYTES
    for lengths in bus.lengths():
        assert sum(lengths[:-1]) <= 2 * BATCH_BYTES
        assert max(lengths, default=0) <= 2 * MAX_CHARS or "truncate_prompt_tokens" in bomb


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["x", HOPELESS]}, "prompt[1]"),
        (CHAT, {"messages": [{"role": "system", "content": HOPELESS}, {"role": "user", "content": "x"}]}, "messages"),
        ("/v1/embeddings", {"input": [HOPELESS]}, "input[0]"),
    ],
)
async def test_a_hopelessly_long_prompt_is_refused_at_the_door(
    served: Served, http: aiohttp.ClientSession, path: str, body: dict[str, Any], param: str
) -> None:
    """As a tokenizer would refuse it, and without asking one."""
    async with http.post(served.url + path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"], error["code"]) == (400, param, 400)
    assert "maximum context length is 200000 tokens" in error["message"]
    assert served.backend.requests == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": HOPELESS, "truncate_prompt_tokens": 5, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "assistant", "content": HOPELESS}, {"role": "user", "content": "x"}]}),
    ],
)
async def test_what_may_fit_is_for_a_tokenizer_to_say(
    served: Served, http: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> None:
    """What is truncated, and what a template may leave out of what the model has said."""
    async with http.post(served.url + path, json=body) as response:
        await response.read()
    assert len(served.backend.requests) == 1


async def test_without_a_word_of_the_tokenizers_nothing_is_refused(served: Served, http: aiohttp.ClientSession) -> None:
    """One of them does not know how long a text may be: a token of it may stand for any."""
    await served.backend.bus.acquire_lease("tokenizer", "another", {"state": "ready"}, ttl_s=1e6)
    await served.refresh()
    async with http.post(served.url + COMPLETIONS, json={"prompt": HOPELESS}) as response:
        await response.read()
    assert len(served.backend.requests) == 1


async def test_long_lists_of_allowed_tokens_are_bits(served: Served, http: aiohttp.ClientSession) -> None:
    """So that whoever reads the request need not look at each id; short ones stay as they are."""
    for ids in (ALL_TOKENS[::2], [5, 3]):
        async with http.post(served.url + COMPLETIONS, json=SHORT | {"allowed_token_ids": ids}) as response:
            assert response.status == 200
    long, short = (request.sampling for request in served.backend.requests)
    assert (long.allowed_token_ids, short.allowed_token_ids, short.allowed_tokens) == ((), (5, 3), "")
    assert from_bits(long.allowed_tokens).nonzero()[0].tolist() == ALL_TOKENS[::2]
    async with http.post(served.url + COMPLETIONS, json=SHORT | {"allowed_token_ids": [1] * (VOCAB + 1)}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "allowed_token_ids")


async def test_a_short_request_does_not_wait_for_long_ones(served: Served, http: aiohttp.ClientSession) -> None:
    """They wait for their turn apart: it is on the bus before the last of them."""
    inbox = served.actor.context.inbox
    heavy, light = inbox._heavy, inbox._outbox
    assert heavy is not light
    url, long = served.url + COMPLETIONS, SHORT | {"prompt": LONG_TEXT}
    asking = [asyncio.create_task(http.post(url, json=long)) for _ in range(2)]
    async with http.post(url, json=SHORT) as response:
        assert response.status == 200
    for task in asking:
        async with await task as response:
            assert response.status == 200
    sent = [[each for each in batch if isinstance(each, GenerateRequest)] for batch in served.actor.bus.published]
    assert all(len({len(each.prompt or "") > 1 for each in batch}) <= 1 for batch in sent)
    assert (light.queued, heavy.queued) == (4, 2)  # with three ends that are told
