"""Calls of tools and reasoning as a server answers them: whole, as a stream, resumed."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import orjson
import pytest

from tests.web.fake_backend import Delta, batch
from tests.web.requests.tool_cases import CALL, NULLS, PATH, SERVED, WEATHER, user


async def test_calls_and_reasoning_of_a_whole_answer(serve, http):
    """The message has its parts, and the finish reason says that calls wait to be answered."""
    served = await serve(model=SERVED)
    body = {"messages": [user(f"Say: {CALL}")], "tools": [WEATHER]}

    async with http.post(served.url + PATH, json=body) as response:
        choice = (await response.json())["choices"][0]

    (call,) = choice["message"].pop("tool_calls")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant", "content": "Well.", "refusal": None, "reasoning_content": "hm", "reasoning": "hm", **NULLS,
    }  # fmt: skip
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
async def test_calls_and_reasoning_of_a_stream(serve, http, more):
    """Deltas in order, with and without log probabilities: every token's is told once."""
    served = await serve(model=SERVED)
    body = {"messages": [user(f"Say: {CALL}")], "tools": [WEATHER], "stream": True, **more}

    async with http.post(served.url + PATH, json=body) as response:
        lines = (await response.text()).split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line and "DONE" not in line]

    names = [next(iter(chunk["delta"]), "") for chunk in chunks]
    assert [name for name in dict.fromkeys(names) if name] == ["role", "reasoning_content", "content", "tool_calls"]
    arguments = "".join(
        chunk["delta"]["tool_calls"][0]["function"]["arguments"] for chunk in chunks if "tool_calls" in chunk["delta"]
    )
    assert arguments == '{"city": "Oslo"}'
    assert chunks[-1]["finish_reason"] == "tool_calls"
    if more:
        told = sum(len((chunk["logprobs"] or {"content": ()})["content"]) for chunk in chunks)
        assert told == -(-len(CALL) // 7)


async def test_reasoning_is_left_out(serve, http):
    """If the client does not want it."""
    served = await serve(model=SERVED)
    body = {"messages": [user("Say: <think>hm</think>Yes.")], "include_reasoning": False}

    async with http.post(served.url + PATH, json=body) as response:
        message = (await response.json())["choices"][0]["message"]

    assert message == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning": None, **NULLS}


async def test_a_stream_of_calls_is_resumed(serve, http):
    """A client that lost the connection in the middle of the arguments gets the rest of them, from a text that is made
    again from its beginning, in other pieces."""
    served = await serve(answers=False, model=SERVED)
    seen, headers = 72, {"Idempotency-Key": "k", "Last-Event-ID": "20.72"}
    body = {"messages": [user("x")], "tools": [WEATHER], "stream": True}
    asking = asyncio.create_task(http.post(served.url + PATH, json=body, headers=headers))
    (sent,) = await served.backend.requested()
    pieces = [
        Delta(sent.request_id, CALL[:30], 8, text_offset=0),
        Delta(sent.request_id, CALL[30:90], 23, text_offset=30),
    ]
    end = Delta(sent.request_id, CALL[90:], 31, text_offset=90, finish_reason="stop")
    for delta in (*pieces, end):
        await served.backend.send(sent.ingress, batch([delta]))

    async with await asking as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    chunks = [orjson.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]

    arguments = "".join(
        chunk["delta"]["tool_calls"][0]["function"]["arguments"] for chunk in chunks if "tool_calls" in chunk["delta"]
    )
    assert CALL[:seen].endswith('"arguments": {"ci')
    assert arguments == 'ty": "Oslo"}'
    assert [set(chunk["delta"]) for chunk in chunks[:-1]] == [{"tool_calls"}] * (len(chunks) - 1)
    assert chunks[-1]["finish_reason"] == "tool_calls"


FAMILIES = {
    "llama3_json": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "pythonic": '[weather(city="Oslo")]',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
    "openai": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parser", FAMILIES)
async def test_calls_of_families_are_served(serve, http, parser, stream):
    """With the schema's types where the format has none, and the finish reason that says calls wait to be answered."""
    served = await serve(model=replace(SERVED, tool_parser=parser, reasoning_parser=""))
    body = {"messages": [user(f"Say: {FAMILIES[parser]}")], "tools": [WEATHER], "stream": stream}

    async with http.post(served.url + PATH, json=body) as response:
        lines = (await response.text()).removeprefix("data: ").split("\n\ndata: ")
    choices = [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]

    calls = [call for choice in choices for call in choice["delta" if stream else "message"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls if "name" in call["function"]] == ["weather"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Oslo"}'
    assert choices[-1]["finish_reason"] == "tool_calls"
