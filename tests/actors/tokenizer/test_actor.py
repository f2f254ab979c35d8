"""The tokenizer actor on a memory bus: outcomes, acks, take-over, poison."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from pagebus.actors.settings import Settings
from pagebus.actors.tokenizer.actor import TokenizerActor
from pagebus.actors.tokenizer.encode import Outcome
from pagebus.bus.contract import START, Entry
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import AbortRequest, GenerateRequest, Message, RequestFailed, SamplingParams, TokenizedRequest
from pagebus.bus.streams import TOKENIZER_GROUP, Names
from tests.helpers.tokenizer_factory import byte_level, model_folder
from tests.helpers.waiting import LIMIT_S, until, until_empty

NAMES = Names()


def request(request_id: str, **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"ingress": "in-0", "sampling": SamplingParams(max_tokens=4)}
    if not changes.keys() & {"prompt", "messages", "prompt_token_ids"}:
        fields["prompt_token_ids"] = np.array([1, 2, 3], np.int32)
    return GenerateRequest(request_id=request_id, **(fields | changes))


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(model=str(model_folder(tmp_path, byte_level())), lease_ttl_s=0.5)


@asynccontextmanager
async def running(server: MemoryServer, settings: Settings, name: str = "tok-0") -> AsyncIterator[TokenizerActor]:
    """An actor that runs; drained and ended at the end."""
    actor = TokenizerActor(settings, MemoryBus(server), name)
    task = asyncio.create_task(actor.run())
    try:
        yield actor
    finally:
        actor.request_drain()
        await task


async def read(bus: MemoryBus, stream: str, count: int) -> list[Message]:
    """The first ``count`` messages of a stream."""
    entries: list[Entry] = []
    while len(entries) < count:
        position = entries[-1].id if entries else START
        entries += await bus.read({stream: position}, block_ms=5000)
    return [entry.message for entry in entries if entry.message is not None]


async def test_requests_become_tokens_or_refusals_and_are_acked(server: MemoryServer, settings: Settings) -> None:
    """Good ones go to the scheduler, bad ones answer their ingress, the work stream is empty afterwards."""
    bus = MemoryBus(server)
    good = [request("a"), request("b", prompt="Hello"), request("c", messages=({"role": "user", "content": "x"},))]
    bad = [request("d", prompt=""), request("e", prompt_token_ids=np.array([400], np.int32), ingress="in-1")]
    await bus.publish([(NAMES.requests, message) for message in (*good, *bad)])
    async with running(server, settings) as actor:
        tokenized = await read(bus, NAMES.tokenized, 3)
        failed = [*await read(bus, NAMES.replies("in-0"), 1), *await read(bus, NAMES.replies("in-1"), 1)]
        await until_empty(bus, NAMES.requests)
        assert {TOKENIZER_GROUP: await bus.consumers(NAMES.requests, TOKENIZER_GROUP)} == {
            TOKENIZER_GROUP: {"tok-0": 0}
        }
        assert actor.lease_info()["state"] == "ready"

    assert [m.request_id for m in tokenized if isinstance(m, TokenizedRequest)] == ["a", "b", "c"]
    assert [(m.request_id, m.status) for m in failed if isinstance(m, RequestFailed)] == [("d", 400), ("e", 400)]


@pytest.mark.parametrize(("skipped", "warns"), [(False, True), (True, False)])
async def test_a_model_without_a_tokenizer_is_told_of(
    server: MemoryServer, tmp_path: Path, skipped: bool, warns: bool
) -> None:
    """The log says at the start that prompts must be token ids, unless it was asked for."""
    settings = Settings(model=str(model_folder(tmp_path, None)), skip_tokenizer_init=skipped)
    with capture_logs() as logged:
        actor = TokenizerActor(settings, MemoryBus(server), "tok-0")
        await actor.start()
        await actor.stop()
    assert [entry["event"] for entry in logged] == ["no tokenizer: prompts must be token ids"] * warns


async def test_what_a_dead_tokenizer_left_is_taken_over(server: MemoryServer, settings: Settings) -> None:
    """A consumer without a lease loses its entries to a live one."""
    bus = MemoryBus(server)
    await bus.create_group(NAMES.requests, TOKENIZER_GROUP)
    await bus.publish([(NAMES.requests, request("a")), (NAMES.requests, request("b"))])
    assert len(await bus.read_group(TOKENIZER_GROUP, "dead", [NAMES.requests])) == 2
    async with running(server, settings):
        tokenized = await read(bus, NAMES.tokenized, 2)
        await until_empty(bus, NAMES.requests)
        assert await bus.consumers(NAMES.requests, TOKENIZER_GROUP) == {"tok-0": 0}

    taken = [m for m in tokenized if isinstance(m, TokenizedRequest)]
    assert [m.request_id for m in taken] == ["a", "b"]
    assert 0 < taken[0].asked < taken[1].asked


async def test_entry_that_keeps_killing_its_tokenizer_is_given_up_alone(
    server: MemoryServer, settings: Settings
) -> None:
    """After three deliveries the first of what a crash left is a dead letter; the others are served."""
    bus = MemoryBus(server)
    await bus.create_group(NAMES.requests, TOKENIZER_GROUP)
    await bus.publish([(NAMES.requests, request(name)) for name in ("poison", "good", "better")])
    for crashed in ("dead-1", "dead-2"):
        if crashed == "dead-1":
            await bus.read_group(TOKENIZER_GROUP, crashed, [NAMES.requests])
        else:
            await bus.claim(NAMES.requests, TOKENIZER_GROUP, crashed, "dead-1")
    async with running(server, settings):
        tokenized = await read(bus, NAMES.tokenized, 2)
        failed = await read(bus, NAMES.replies("in-0"), 1)
        await until_empty(bus, NAMES.requests)

    assert [m.request_id for m in tokenized if isinstance(m, TokenizedRequest)] == ["good", "better"]
    assert [(m.request_id, m.status) for m in failed if isinstance(m, RequestFailed)] == [("poison", 500)]
    assert await bus.length(NAMES.dead_letters("tokenizer")) == 1


async def test_undecodable_and_foreign_entries_go_to_the_dead_letters(server: MemoryServer, settings: Settings) -> None:
    """They are acked away; requests beside them are served."""
    bus = MemoryBus(server)
    server.publish(NAMES.requests, {b"junk": b"\x00\xff"})
    await bus.publish([(NAMES.requests, AbortRequest(request_id="x")), (NAMES.requests, request("a"))])
    async with running(server, settings):
        await read(bus, NAMES.tokenized, 1)
        await until_empty(bus, NAMES.requests)

    assert await bus.length(NAMES.dead_letters("tokenizer")) == 2


class Fails:
    """An encoder with a bug."""

    def __init__(self, encode: Callable[[Sequence[GenerateRequest]], list[Outcome]]) -> None:
        self._encode = encode

    def encode(self, requests: Sequence[GenerateRequest]) -> list[Outcome]:
        outcomes = self._encode(requests)
        if any(r.request_id == "boom" for r in requests):
            raise RuntimeError("bug")
        return outcomes

    def is_quick(self, requests: Sequence[GenerateRequest]) -> bool:
        """Not that anybody knew."""
        return False

    def is_heavy(self, request: GenerateRequest) -> bool:
        """Nor so bad."""
        return False

    max_chars = None
    reads_text = True

    def close(self) -> None:
        """Nothing runs."""


async def test_bug_on_one_request_is_a_500_for_it_alone(
    server: MemoryServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception out of the encoder costs neither the actor nor the other requests."""
    from pagebus.actors.tokenizer import actor as module

    load = module.load_encoder
    monkeypatch.setattr(module, "load_encoder", lambda settings: Fails(load(settings).encode))
    bus = MemoryBus(server)
    await bus.publish([(NAMES.requests, request(name)) for name in ("a", "boom", "b")])
    async with running(server, settings):
        tokenized = await read(bus, NAMES.tokenized, 2)
        failed = await read(bus, NAMES.replies("in-0"), 1)
        await until_empty(bus, NAMES.requests)

    assert [m.request_id for m in tokenized if isinstance(m, TokenizedRequest)] == ["a", "b"]
    assert [(m.request_id, m.status) for m in failed if isinstance(m, RequestFailed)] == [("boom", 500)]


async def test_the_first_of_many_do_not_wait_for_the_others(
    server: MemoryServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that come together some are with the scheduler before the rest is encoded."""
    from pagebus.actors.tokenizer import actor as module

    sizes: list[int] = []
    first_came = threading.Event()

    class Waits(Fails):
        def encode(self, requests: Sequence[GenerateRequest]) -> list[Outcome]:
            assert not sizes or first_came.wait(LIMIT_S)
            sizes.append(len(requests))
            return super().encode(requests)

    load = module.load_encoder
    monkeypatch.setattr(module, "load_encoder", lambda settings: Waits(load(settings).encode))
    bus = MemoryBus(server)
    await bus.publish([(NAMES.requests, request(str(number))) for number in range(20)])
    async with running(server, settings):
        assert len(await read(bus, NAMES.tokenized, 4)) == 4
        first_came.set()
        tokenized = await read(bus, NAMES.tokenized, 20)
        await until_empty(bus, NAMES.requests)

    assert [m.request_id for m in tokenized if isinstance(m, TokenizedRequest)] == [str(n) for n in range(20)]
    assert sizes == [4, 8, 8]


async def test_bus_outage_loses_nothing(server: MemoryServer, settings: Settings) -> None:
    """Requests that come around an outage are tokenized once it is over."""
    bus = MemoryBus(server)
    async with running(server, settings) as actor:
        await bus.publish([(NAMES.requests, request("a"))])
        await read(bus, NAMES.tokenized, 1)
        server.unavailable = True
        await until(lambda: actor.bus_retry.away)
        server.unavailable = False
        await bus.publish([(NAMES.requests, request("b"))])
        assert len(await read(bus, NAMES.tokenized, 2)) == 2
