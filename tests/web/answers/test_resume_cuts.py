"""Streams that break at any byte, and go on at either ingress: nothing is missing, nothing comes twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.app import IngressActor
from tests.helpers.waiting import until
from tests.web.fake_backend import MODEL, Served, start_served

SERVED = replace(MODEL, auto_tools=True, tool_parser="hermes", reasoning_parser="qwen3")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CALLS = (
    "<think>hm, let me see</think>Well.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)
SAY_CALLS = [{"role": "user", "content": f"Say: {CALLS}"}]
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ANTHROPIC_TOOL = {"name": "weather", "input_schema": PARAMETERS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "a b", **STREAM}),
    "completions": (COMPLETIONS, {"prompt": ["a b", "c d e"], "n": 2, "stream": True}),
    "echo": (COMPLETIONS, {"prompt": "a b", "n": 2, "echo": True, "logprobs": 2, "return_token_ids": True, **STREAM}),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 3, **STREAM}),
    "tools": (CHAT, {"messages": SAY_CALLS, "tools": [WEATHER], "n": 2, **STREAM}),
    "tools and logprobs": (
        CHAT, {"messages": SAY_CALLS, "tools": [WEATHER], "logprobs": True, "top_logprobs": 2, **STREAM}
    ),
    "some tokens at a time": (CHAT, {"messages": SAY_CALLS, "tools": [WEATHER], "stream_interval": 3, **STREAM}),
    "one tool a call": (
        CHAT, {"messages": SAY_CALLS, "tools": [WEATHER], "parallel_tool_calls": False, "stream": True}
    ),
    "anthropic": (MESSAGES, {"messages": SAY_CALLS, "tools": [ANTHROPIC_TOOL], "max_tokens": 100, "stream": True}),
}  # fmt: skip
Event = tuple[str, str]
"""Id and data."""


@dataclass
class Pair:
    """Two ingresses of one deployment."""

    first: Served
    second: IngressActor

    @property
    def urls(self) -> tuple[str, str]:
        return self.first.url, f"http://127.0.0.1:{self.second.port}"


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(
        "pagebus.web.ingress.inbox.TURN_S", 1e6
    )  # what is told in one go is taken in so, however slow the machine is
    server = MemoryServer()
    first = await start_served(lambda: MemoryBus(server), SERVED)
    settings = Settings(port=0, drain_timeout_s=0.05, lease_ttl_s=60.0)
    second = IngressActor(settings, MemoryBus(server), "ingress-1", model=SERVED)
    running = asyncio.create_task(second.run())
    await until(lambda: second.state == "ready" and not second.context.missing())
    yield Pair(first, second)
    second.request_drain()
    await running
    await second.bus.close()
    await first.stop()


def whole_events(stream: bytes) -> list[Event]:
    """The events that came whole. A client knows no others."""
    found = []
    for event in stream.split(b"\n\n")[:-1]:
        fields = dict(line.split(b": ", 1) for line in event.split(b"\n"))
        found.append((fields.get(b"id", b"").decode(), fields[b"data"].decode()))
    return found


def told(events: Iterable[Event]) -> dict[str, Any]:
    """What a client makes of the events of chats and completions."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"choices": choices, "usage": [], "ends": 0}
    for _, data in events:
        if data == "[DONE]":
            whole["ends"] += 1
            continue
        event = json.loads(data)
        if event["choices"]:
            whole |= {name: event[name] for name in ("prompt_token_ids",) if name in event}
        else:
            whole["usage"].append(event["usage"])
        for choice in event["choices"]:
            add(choices.setdefault(choice["index"], {"calls": {}}), choice, event.get("usage"))
    return whole


def add(known: dict[str, Any], choice: dict[str, Any], usage: Any) -> None:
    """Add what an event tells of a choice, with the usage so far."""
    delta = choice.get("delta") or {"content": choice.get("text")}
    known["usage"] = usage
    for name in ("role", "content", "reasoning"):
        known[name] = known.get(name, "") + (delta.get(name) or "")
    for call in delta.get("tool_calls") or ():
        calls = known["calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
        calls["id"] += call.get("id", "")
        for name in ("name", "arguments"):
            calls[name] += call["function"].get(name, "")
    for name, numbers in (choice.get("logprobs") or {}).items():
        known[f"logprobs.{name}"] = known.get(f"logprobs.{name}", []) + (numbers or [])
    for name in ("token_ids", "prompt_token_ids"):
        known[name] = known.get(name, []) + (choice.get(name) or [])
    for name in ("finish_reason", "stop_reason"):
        known[name] = [*known.get(name, []), choice[name]] if choice.get(name) else known.get(name, [])


def message(events: Iterable[Event]) -> list[Any]:
    """Anthropic's events, the parts of a block in one."""
    merged: list[Any] = []
    for _, data in events:
        event = json.loads(data)
        if event["type"] == "message_start":
            event["message"].pop("usage")  # as of the first token, which may come with others
        if merged and event["type"] == merged[-1]["type"] == "content_block_delta":
            for name, text in event["delta"].items():
                merged[-1]["delta"][name] += text if name != "type" else ""
        else:
            merged.append(event)
    return merged


async def ask(http: aiohttp.ClientSession, url: str, case: str, last: str = "") -> bytes:
    """The stream, behind the event ``last``, without the time in it."""
    path, body = CASES[case]
    headers = {"Idempotency-Key": case} | ({"Last-Event-ID": last} if last else {})
    async with http.post(url + path, json={"model": "fake-model", **body}, headers=headers) as response:
        assert response.status == 200, await response.text()
        data = await response.read()
    created = data.partition(b'"created":')[2].partition(b",")[0]
    return data.replace(b'"created":' + created, b'"created":0') if created else data


@pytest.mark.parametrize("recorded_at_once", [True, False])
@pytest.mark.parametrize("case", CASES)
async def test_a_stream_is_cut_at_every_byte(
    pair: Pair, http: aiohttp.ClientSession, case: str, recorded_at_once: bool
) -> None:
    """Every event has an id; whatever of the stream has come, the rest comes at either ingress, once, whether
    it is told in one go or token by token. If it is told as before, the very events."""
    backend, read = pair.first.backend, message if CASES[case][0] == MESSAGES else told
    backend.at_once = recorded_at_once
    recorded = await ask(http, pair.urls[0], case)
    events = whole_events(recorded)
    assert all(event_id for event_id, _ in events)
    beginnings = {recorded[:cut].rpartition(b"\n\n")[0] for cut in range(len(recorded))}
    assert len(beginnings) == len(events)
    for beginning in beginnings:
        had = whole_events(beginning + b"\n\n") if beginning else []
        last = had[-1][0] if had else ""
        for backend.at_once in (True, False):
            for url in pair.urls:
                rest = whole_events(await ask(http, url, case, last))
                if backend.at_once and recorded_at_once:
                    assert had + rest == events, last
                else:
                    assert read(had + rest) == read(events), last


async def test_ids_tell_all_choices_apart(pair: Pair, http: aiohttp.ClientSession) -> None:
    """No two events have the same id."""
    pair.first.backend.at_once = True
    for case in CASES:
        ids = [event_id for event_id, _ in whole_events(await ask(http, pair.urls[0], case))]
        assert len(set(ids)) == len(ids), case
