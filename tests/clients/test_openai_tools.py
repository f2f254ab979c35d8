"""OpenAI's own client: structured outputs, tools and reasoning, with its types and its helpers for streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.helpers.waiting import LIMIT_S
from tests.web.fake_backend import MODEL, SAY

CALLS = (
    "<think>two things</think>I look.\n"
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Clock", "arguments": {}}\n</tool_call>'
)


class Weather(BaseModel):
    """A tool's arguments."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=9)


class Clock(BaseModel):
    """A tool without arguments."""


class Review(BaseModel):
    """A structured output."""

    mood: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)
    words: list[str] = Field(max_length=0)


TOOLS: Any = [pydantic_function_tool(Weather), pydantic_function_tool(Clock)]


@pytest.fixture
def tool_client(calling) -> Iterator[OpenAI]:
    """Of a server with parsers, whose model says what it is told to say."""
    with OpenAI(base_url=calling.base_url, api_key=calling.expects.api_key) as client:
        yield client


@pytest.fixture
def client(base_url, expects) -> Iterator[OpenAI]:
    """Of a whole system: something has to follow the grammars."""
    if not expects.is_whole:
        pytest.skip("a grammar needs a model")
    with OpenAI(base_url=base_url, api_key=expects.api_key, timeout=LIMIT_S) as client:
        yield client


def ask(client: OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL.name, messages=[{"role": "user", "content": SAY + text}], tools=TOOLS, **more
    )


def test_a_budget_of_thoughts(tool_client):
    """vLLM's field, of chats and of completions, is taken where the server reads reasoning."""
    extra: Any = {"extra_body": {"thinking_token_budget": 5}}
    chat = tool_client.chat.completions.create(model=MODEL.name, messages=[{"role": "user", "content": "x"}], **extra)
    completion = tool_client.completions.create(model=MODEL.name, prompt="x", **extra)

    assert (chat.choices[0].finish_reason, completion.choices[0].finish_reason) == ("stop", "stop")


def test_calls_and_reasoning(tool_client):
    """Typed calls with arguments that can be parsed; what comes before them; the answer to them goes back."""
    choice = ask(tool_client, CALLS).choices[0]

    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "two things")
    assert [call.function.name for call in choice.message.tool_calls] == ["Weather", "Clock"]
    assert Weather.model_validate_json(choice.message.tool_calls[0].function.arguments) == Weather(city="Oslo", days=2)
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in choice.message.tool_calls]
    history: Any = [{"role": "user", "content": "hi"}, choice.message, *results]
    again = tool_client.chat.completions.create(model=MODEL.name, messages=history, tools=TOOLS)
    assert again.choices[0].finish_reason == "stop"


def test_calls_of_a_stream(tool_client):
    """The client's own accumulator makes the same of the deltas."""
    whole = ask(tool_client, CALLS).choices[0].message
    stream: Any = tool_client.chat.completions.stream(
        model=MODEL.name, messages=[{"role": "user", "content": SAY + CALLS}], tools=TOOLS
    )
    with stream as events:
        kinds = [event.type for event in events]
        message = events.get_final_completion().choices[0].message

    assert "tool_calls.function.arguments.delta" in kinds
    assert message.content == whole.content
    assert [(each.function.name, each.function.arguments) for each in message.tool_calls] == [
        (each.function.name, each.function.arguments) for each in whole.tool_calls
    ]
    assert message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo", days=2)


def test_one_call_at_a_time(tool_client):
    """With ``parallel_tool_calls`` false."""
    choice = ask(tool_client, CALLS, parallel_tool_calls=False).choices[0]

    assert [call.function.name for call in choice.message.tool_calls] == ["Weather"]


@pytest.mark.parametrize("stream", [False, True])
def test_required_and_named(client, expects, stream):
    """Any model calls tools if it has to, with arguments of the right types."""
    for choice, reason in (
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "Weather"}}, "stop"),
    ):
        body: Any = {
            "model": expects.model, "messages": [{"role": "user", "content": "Weather?"}], "temperature": 1,
            "tools": TOOLS[:1], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200, "seed": 1,
        }  # fmt: skip
        if stream:
            with client.chat.completions.stream(**body) as events:
                answer = events.get_final_completion().choices[0]
        else:
            answer = client.chat.completions.create(**body).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name == "Weather"
        assert Weather.model_validate_json(call.function.arguments)
        assert answer.finish_reason == reason


def test_parsed_outputs(client, expects):
    """``parse`` gives objects of the class that the schema was made from, in messages that can be sent back."""
    question = {"role": "user", "content": "A review?"}
    answer = client.chat.completions.parse(
        model=expects.model, messages=[question], response_format=Review, n=2, temperature=1, max_tokens=100
    )
    turns: Any = [question, answer.choices[0].message.to_dict(warnings=False), question]
    again = client.chat.completions.create(model=expects.model, messages=turns, max_tokens=1)

    assert all(isinstance(choice.message.parsed, Review) for choice in answer.choices)
    assert again.choices[0].finish_reason == "length"


def test_json_object(client, expects):
    """Any object; a schema that cannot be served names its field."""
    body: Any = {"model": expects.model, "messages": [{"role": "user", "content": "{}"}], "max_tokens": 40}
    answer = client.chat.completions.create(**body, response_format={"type": "json_object"}, logit_bias={"93": 2})
    choice = answer.choices[0]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            **body,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
        )

    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
    assert caught.value.param == "response_format.json_schema.schema"
