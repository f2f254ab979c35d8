"""Requests that take long to encode: others do not wait for them, and clients take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from pagebus.actors.settings import Settings
from pagebus.actors.tokenizer.actor import TokenizerActor
from pagebus.actors.tokenizer.encode import HEAVY_LENGTH, Encoder, Limits, Outcome
from pagebus.actors.tokenizer.heavy import Heavy
from pagebus.bus.contract import START, Entry, EntryId
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import GenerateRequest, SamplingParams
from pagebus.bus.streams import Names
from tests.helpers.tokenizer_factory import byte_level, model_folder
from tests.helpers.waiting import until

NAMES = Names()


def request(request_id: str, prompt: str, client: str = "") -> GenerateRequest:
    sampling = SamplingParams(max_tokens=4)
    return GenerateRequest(request_id=request_id, ingress="in", sampling=sampling, prompt=prompt, client=client)


def test_all_that_a_template_is_told_makes_a_chat_long() -> None:
    """Its prompt may hold tools, documents and arguments too."""
    encoder, text = Encoder(None, Limits(64, 400, 16)), "x" * HEAVY_LENGTH
    short = replace(request("a", ""), prompt=None, messages=({"role": "user", "content": "Hi"}, "not a message"))
    assert not encoder.is_heavy(short)
    for field, value in (
        ("messages", ({"role": "user", "content": [{"type": "text", "text": text}]},)),
        ("tools", ({"type": "function", "function": {"name": "f", "description": text}},)),
        ("documents", ({"text": text},)),
        ("chat_template_kwargs", {"rules": text}),
    ):
        assert encoder.is_heavy(replace(short, **{field: value})), field


async def test_clients_take_turns() -> None:
    """One with many is not before one with few, who come later."""
    order: list[str] = []

    async def process(entry: Entry) -> None:
        assert entry.message is not None
        order.append(entry.message.request_id)  # type: ignore[union-attr]
        await asyncio.sleep(0)

    heavy = Heavy(process)
    names = [("a", "a"), ("a", "b"), ("a", "c"), ("b", "d"), ("c", "e"), ("b", "f")]
    begun = [heavy.add(Entry("s", EntryId(1, 1), request(name, "x", client))) for client, name in names]
    assert begun == [True, False, False, False, False, False]
    await heavy.run()
    assert order == list("adebfc")
    assert heavy.add(Entry("s", EntryId(1, 1), request("g", "x")))


async def test_others_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request is with the scheduler while a long one is still being encoded, which ends all the same, before
    the actor does. The lease says how long a text may be."""
    goes_on, encode = threading.Event(), Encoder.encode

    def slowly(self: Encoder, requests: Sequence[GenerateRequest]) -> list[Outcome]:
        if len(requests[0].prompt or "") > HEAVY_LENGTH:
            goes_on.wait()
        return encode(self, requests)

    monkeypatch.setattr(Encoder, "encode", slowly)
    server = MemoryServer()
    bus = MemoryBus(server)
    folder = model_folder(tmp_path, byte_level(), max_position_embeddings=200_000)
    actor = TokenizerActor(Settings(model=str(folder)), MemoryBus(server), "tok-0")
    running = asyncio.create_task(actor.run())
    for name, prompt in (("long", "x" * (HEAVY_LENGTH + 1)), ("short", "x")):
        await bus.publish([(NAMES.requests, request(name, prompt))])
    position, told = START, []
    while not told:
        for entry in await bus.read({NAMES.tokenized: position}):
            position = entry.id
            told.append(entry.message.request_id)  # type: ignore[union-attr]
    assert told == ["short"]
    assert isinstance(actor.lease_info()["max_prompt_chars"], int)
    actor.request_drain()
    goes_on.set()
    await running
    assert await bus.length(NAMES.tokenized) == 2
    await until(lambda: actor.state == "stopped" or running.done())
