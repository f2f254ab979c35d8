"""Anthropic's API, spoken by Anthropic's client; and the translation both ways, with tools and thoughts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import anthropic
import pytest

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.web.adapters.messages import MessageEvents, message_of, read_count, read_message
from pagebus.web.http.errors import ApiError
from pagebus.web.routes.generate.messages import parse_message
from tests.web.fake_backend import MODEL, SENTENCE, Serve, Served, start_served

TEXT = "".join(SENTENCE)
ASK: dict[str, Any] = {
    "model": MODEL.name,
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "What is a dog?"}],
}

COUNT = {name: value for name, value in ASK.items() if name != "max_tokens"}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    server = MemoryServer()
    started = await start_served(lambda: MemoryBus(server), api_key=("key",))
    yield started
    await started.stop()


@pytest.fixture
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="key", max_retries=0) as made:
        yield made


async def test_a_message(served: Served, client: anthropic.AsyncAnthropic) -> None:
    """Asked for with a system prompt and blocks of text, answered whole."""
    message = await client.messages.create(
        **ASK | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["zz"], metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_k": 3},
    )  # fmt: skip
    assert [block.text for block in message.content] == [TEXT]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.usage.output_tokens == len(SENTENCE)
    (request,) = served.backend.requests
    roles = [(each["role"], each["content"]) for each in request.messages or ()]
    assert roles == [("system", "Be brief."), ("user", "Hello")]
    assert (request.sampling.max_tokens, request.sampling.top_k, request.sampling.stop) == (20, 3, ("zz",))


async def test_a_stream(client: anthropic.AsyncAnthropic) -> None:
    """Events in Anthropic's order, and the whole message from them."""
    async with client.messages.stream(**ASK) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert message.content[0].text == TEXT
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len(SENTENCE))


async def test_length(client: anthropic.AsyncAnthropic) -> None:
    """An answer that was cut says so."""
    message = await client.messages.create(**ASK | {"max_tokens": 2})
    assert message.stop_reason == "max_tokens"


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic) -> None:
    """Without generating anything."""
    counted = await client.messages.count_tokens(model=MODEL.name, messages=ASK["messages"])
    assert counted.input_tokens > 0


async def test_which_request_was_answered(client: anthropic.AsyncAnthropic) -> None:
    """Anthropic's client finds the id in answers and in errors."""
    headers = {"X-Request-Id": "mine"}
    assert (await client.messages.create(**ASK, extra_headers=headers))._request_id == "mine"
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.messages.create(**ASK | {"model": "other"}, extra_headers=headers)
    assert (caught.value.request_id, caught.value.body["request_id"]) == ("mine", "mine")
    with pytest.raises(anthropic.NotFoundError, match="no route GET /v1/messages/batches") as unknown:
        await client.messages.batches.list(extra_headers=headers)
    assert (unknown.value.request_id, unknown.value.body["type"]) == ("mine", "error")


async def test_errors(served: Served, client: anthropic.AsyncAnthropic) -> None:
    """In Anthropic's shape, with the field's name."""
    with pytest.raises(anthropic.BadRequestError, match="messages\\[0\\]") as caught:
        await client.messages.create(**ASK | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**ASK | {"model": "other"})
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await client.with_options(api_key="wrong").messages.create(**ASK)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert served.backend.requests == []


@pytest.mark.parametrize(("path", "status"), [("", 405), ("/", 307), ("/batches", 404), ("/count_tokens", 405)])
@pytest.mark.parametrize("root_path", [None, "/llm"])
async def test_errors_without_a_route(
    serve: Serve, http: aiohttp.ClientSession, root_path: str | None, path: str, status: int
) -> None:
    """Paths below Anthropic's routes speak as these do, also to a client that does not say which API it speaks."""
    served = await serve(root_path=root_path)
    url = f"{served.url}{root_path or ''}/v1/messages{path}"
    async with http.request("POST" if path == "/" else "GET", url, allow_redirects=False) as response:
        assert response.status == status
        if status != 307:
            assert (await response.json()).keys() == {"type", "error", "request_id"}


async def test_models(client: anthropic.AsyncAnthropic) -> None:
    """In Anthropic's form, page by page forwards and backwards, and one of them."""
    names = list(MODEL.names)
    listed = [model async for model in client.models.list(limit=1)]
    assert [(each.type, each.id, each.display_name) for each in listed] == [("model", name, name) for name in names]
    assert {each.created_at.timestamp() for each in listed} == {MODEL.created_s}
    assert [model.id async for model in client.models.list(before_id=names[-1])] == names[:-1]
    assert await client.models.retrieve(names[0]) == listed[0]
    assert listed[0].max_input_tokens == MODEL.max_model_len
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.models.retrieve("other")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    for wrong in ({"after_id": "other"}, {"before_id": "other"}, {"limit": 0}):
        with pytest.raises(anthropic.BadRequestError, match=next(iter(wrong))):
            await client.models.list(**wrong)


def test_thinking_that_is_disabled() -> None:
    """The template is told, in the words of all families; what the client tells it counts more."""
    off = {"thinking": {"type": "disabled"}}
    both = {"thinking": False, "enable_thinking": False}
    assert read_message(ASK | off)["chat_template_kwargs"] == both
    assert read_message(ASK | off | {"chat_template_kwargs": {"a": 1}})["chat_template_kwargs"] == both | {"a": 1}
    on = {"enable_thinking": True}
    assert read_message(ASK | off | {"chat_template_kwargs": on})["chat_template_kwargs"] == on
    assert "chat_template_kwargs" not in read_message(ASK)


def test_thinking_that_is_enabled() -> None:
    """Has a chat's budget, and switches reasoning on where it is off; no token of it is in the prompt."""
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}}
    read = read_message(ASK | enabled)
    assert read["thinking_token_budget"] == 1024
    assert read["include_reasoning"] is False
    assert read["chat_template_kwargs"] == {"thinking": True, "enable_thinking": True}
    assert "thinking_token_budget" not in read_count(COUNT | enabled)
    with pytest.raises(ApiError, match="--reasoning-parser") as caught:
        parse_message(ASK | enabled, MODEL)
    assert caught.value.param == "thinking.budget_tokens"


def test_what_claude_code_sends_and_what_changes_nothing() -> None:
    """Thinking that is left to the model is that of a chat; thoughts of earlier answers are gone anyway."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    sent = {"thinking": {"type": "adaptive"}, "context_management": {"edits": edits}}
    assert read_message(ASK | sent) == read_message(ASK)
    assert read_count(COUNT | sent) == read_count(COUNT)


def test_effort() -> None:
    """Is a chat's ``reasoning_effort``, which is in the prompt."""
    low = {"output_config": {"effort": "low"}}
    assert read_message(ASK | low) == read_message(ASK) | {"reasoning_effort": "low"}
    assert read_count(COUNT | low) == read_count(COUNT) | {"reasoning_effort": "low"}
    with pytest.raises(ApiError) as caught:
        parse_message(ASK | {"output_config": {"effort": "huge"}}, MODEL)
    assert caught.value.param == "output_config.effort"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"nonsense": 1}, "nonsense"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits[0].type"),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": 1, "nonsense": 1}, "nonsense"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format"),
    ],
)
def test_fields_that_are_refused(change: dict[str, Any], param: str) -> None:
    """Each by its name."""
    with pytest.raises(ApiError) as caught:
        read_message(ASK | change)
    assert caught.value.param == param


def test_a_schema_for_the_answer() -> None:
    """Is the chat's."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    chat = read_message(ASK | {"output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    """Tools, calls, results, and an answer whose beginning is given."""
    chat = read_message(
        ASK
        | {
            "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "messages": [
                {"role": "user", "content": "How warm?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "21"}]},
                    {"type": "text", "text": "Well?"},
                ]},
                {"role": "assistant", "content": "It is"},
            ],
        }
    )  # fmt: skip
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Ulm"}'}}
    assert chat["messages"][1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "21"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It is"},
    ]
    assert chat["continue_final_message"] is True


def test_calls_and_thoughts_become_blocks() -> None:
    """In a whole answer, and in a stream: one block at a time."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": "So.", "reasoning": "Hm.", "tool_calls": [call]}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    choice = {"index": 0, "message": said, "finish_reason": "tool_calls", "stop_reason": None}
    message = message_of({"id": "m", "model": "x", "choices": [choice], "usage": usage})
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == {"a": 1}
    assert (message["stop_reason"], message["usage"]["input_tokens"]) == ("tool_use", 4)
    for cut in ('{"a": ', "", "7"):
        call["function"]["arguments"] = cut
        message = message_of({"id": "m", "model": "x", "choices": [choice], "usage": usage})
        assert message["content"][2]["input"] == {}
    assert message["usage"]["cache_read_input_tokens"] == 5

    events, deltas = MessageEvents("m", "x"), [
        {"role": "assistant", "content": ""},
        {"reasoning": "Hm."},
        {"content": "So."},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]},
        {"tool_calls": [{"index": 1, "id": "d", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    ]  # fmt: skip
    told: list[dict[str, Any]] = []
    for delta in deltas:
        told += events.chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    told += events.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    told += events.chunk({"choices": [], "usage": usage})
    told += events.end()
    starts = [each["content_block"]["type"] for each in told if each["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    assert sum(each["type"] == "content_block_stop" for each in told) == 4
    assert told[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_named_tool_ends_with_tool_use() -> None:
    """As Anthropic's messages do, whole and streamed; the chat ends with "stop", as OpenAI's do."""
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    choice = {"index": 0, "message": {"tool_calls": [call]}, "finish_reason": "stop", "stop_reason": None}
    assert message_of({"id": "m", "model": "x", "choices": [choice], "usage": usage})["stop_reason"] == "tool_use"
    events = MessageEvents("m", "x")
    told = list(events.chunk({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}))
    told += events.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage})
    told += events.end()
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
