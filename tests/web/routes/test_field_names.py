"""Routes that are served as chats name fields in errors as their clients do, never as a chat has them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pagebus.bus.messages import RequestFailed
from pagebus.web.adapters.response_events import ResponseEvents, new_response
from tests.web.fake_backend import Served

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 3}
RESPONSE = {"input": "x", "max_output_tokens": 3}
TURN = {"role": "user", "content": "x"}
MESSAGE = {"messages": [TURN], "max_tokens": 3}
FUNCTION = {"type": "function", "name": "f"}


async def refused(http, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        assert response.status == 400, await response.text()
        error: dict[str, Any] = (await response.json())["error"]
    return error


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_output_tokens": 2**20}, "max_output_tokens"),
        ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"effort": "foo"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": [1]}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{**TURN, "mood": "good"}]}, "input[0].mood"),
        (
            {"input": [{**TURN, "content": [{"type": "input_text", "text": "x", "tone": 1}]}]},
            "input[0].content[0].tone",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}", "async": True}]}, "input[0].async"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": 5}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "summery": []}]}, "input[0].summery"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f", "mode": 1}}, "tool_choice.mode"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/render"])
async def test_responses(serve, http, path, change, param):
    """In `param`, and at the beginning of the message."""
    error = await refused(http, (await serve()).url + path, {**RESPONSE, **change})
    assert (error["param"], error["message"].split(":")[0]) == (param, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": 2**20}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"messages": [{**TURN, "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]}]},
         "messages[0].content[0].input"),
        ({"messages": [TURN, {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "kind": 1}]}]},
         "messages[1].content[0].kind"),
        ({"messages": [TURN, {"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]},
         "messages[1].content[0].thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "is_error": "no"}]}]},
         "messages[0].content[0].is_error"),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"name": "f", "schema": {}}]}, "tools[0].schema"),
        ({"cache_control": 5}, "cache_control"),
        ({"system": "s", "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/render"])
async def test_messages(serve, http, path, change, param):
    """The same; of a turn that has become several messages it is not told which."""
    error = await refused(http, (await serve()).url + path, {**MESSAGE, **change})
    assert (error["param"], error["message"].split(":")[0]) == (param, param)


TOO_LONG = "Your prompt has 60 tokens and {} is 9: at most 4 fit. Please reduce {}."
SCHEMA = "{}: Invalid type: strin"
REFUSED = "The chat template refuses these messages: no."


@pytest.mark.parametrize(
    ("path", "body", "found", "told"),
    [
        ("/v1/responses", RESPONSE, ("max_tokens", TOO_LONG), ("max_output_tokens", TOO_LONG)),
        ("/v1/responses", RESPONSE, ("messages", REFUSED), ("input", REFUSED)),
        ("/v1/responses", RESPONSE, ("tools[1].function.parameters", SCHEMA), ("tools[1].parameters", SCHEMA)),
        ("/v1/messages", MESSAGE, ("tools[1].function.parameters", SCHEMA), ("tools[1].input_schema", SCHEMA)),
        ("/v1/messages", MESSAGE, ("max_tokens", TOO_LONG), ("max_tokens", TOO_LONG)),
        ("/v1/chat/completions", CHAT, ("max_tokens", TOO_LONG), ("max_completion_tokens", TOO_LONG)),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 3}, ("max_tokens", TOO_LONG),
         ("max_completion_tokens", TOO_LONG)),
        ("/v1/chat/completions", {"messages": [TURN], "max_tokens": 3}, ("max_tokens", TOO_LONG),
         ("max_tokens", TOO_LONG)),
    ],
)  # fmt: skip
async def test_what_a_tokenizer_finds(serve, http, path, body, found, told):
    """It only knows chats."""
    served = await serve(answers=False)
    (param, text), (new, expected) = found, told

    error = await failed(served, http, path, body, param, text.replace("{}", param))
    assert (error["param"], error["message"]) == (new, expected.replace("{}", new))


async def failed(
    served: Served, http, path: str, body: dict[str, Any], param: str, message: str, *, last: int = 0
) -> dict[str, Any]:  # fmt: skip
    """The error of a call of which a tokenizer refuses the request with the index ``last``, the last one."""

    async def fail() -> None:
        request = (await served.backend.requested(last + 1))[last]
        failure = RequestFailed(request_id=request.request_id, status=400, error_type="", message=message, param=param)
        await served.backend.send(served.address, failure)

    failing = asyncio.create_task(fail())
    error = await refused(http, served.url + path, body)
    await failing
    return error


@pytest.mark.parametrize(
    ("path", "body", "found", "told"),
    [
        ("/v1/completions", {"prompt": "a"}, "prompt", "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt", "prompt[1]"),
        ("/v1/completions", {"prompt": [[1], [2]]}, "prompt", "prompt[1]"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "input", "input[1]"),
        ("/v1/embeddings", {"messages": [TURN]}, "input", "messages"),
        ("/v1/embeddings", {"input": [[TURN], [TURN]]}, "input", "input[1]"),
        ("/pooling", {"messages": [TURN], "task": "embed"}, "input", "messages"),
        ("/score", {"text_1": "a", "text_2": "b"}, "input", "text_2"),
        ("/score", {"queries": "a", "documents": ["b", "c"]}, "input", "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}, "input", "documents[1]"),
        ("/tokenize", {"prompt": "a"}, "prompt", "prompt"),
        ("/v1/completions/render", {"prompt": ["a", "b"]}, "prompt", "prompt[1]"),
    ],
)
async def test_which_prompt(serve, http, path, body, found, told):
    """A tokenizer sees one of them, and nothing of the field that it came in."""
    values = [body.get(name, []) for name in ("prompt", "input", "messages", "text_2", "documents")]
    last = max(len(value) for value in values if isinstance(value, list)) - 1 if "[" in told else 0
    last += 1 if path in ("/score", "/rerank") else 0  # behind the text that others are compared with
    error = await failed(await serve(answers=False), http, path, body, found, "It is empty.", last=last)
    assert error["param"] == told


async def test_what_is_quoted_is_not_renamed(serve, http):
    """It is what the client has sent, whatever it looks like."""
    body = {**RESPONSE, "reasoning": {"effort": "max_tokens"}}
    error = await refused(http, (await serve()).url + "/v1/responses", body)
    assert error["message"].endswith("got 'max_tokens'")


async def test_the_request_within_a_body(serve, http):
    """Fields of the request that an answer is of are named with their place."""
    body = {"generate_response": {"choices": [{"token_ids": [5]}]}, "chat_request": {"messages": [{"role": "user"}]}}
    error = await refused(http, (await serve()).url + "/v1/chat/completions/derender", body)
    place = "chat_request.messages[0].content"
    assert (error["param"], error["message"].split(":")[0]) == (place, place)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {**CHAT, "min_tokens": 4},
         "min_tokens: must not be more than max_completion_tokens (3), got 4"),
        ("/v1/responses", {**RESPONSE, "min_tokens": 4},
         "min_tokens: must not be more than max_output_tokens (3), got 4"),
        ("/v1/responses", {**RESPONSE, "structured_outputs": {"regex": "a"},
                           "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}},
         "structured_outputs.regex: cannot be combined with text.format.schema"),
    ],
)  # fmt: skip
async def test_other_fields_in_a_message(serve, http, path, body, message):
    """A message names no field that the client has not sent."""
    error = await refused(http, (await serve()).url + path, body)
    assert error["message"] == message


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [], "encrypted_content": None, "status": None}
SAID = {"type": "output_text", "text": "x", "annotations": [], "logprobs": [{"token": "x", "logprob": -1.0}],
        "parsed": {"a": 1}}  # fmt: skip
ITEMS = [
    TURN,
    THOUGHT,
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [SAID], "phase": None},
    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed",
     "async": False, "caller": {"type": "direct"}, "parsed_arguments": {}},
    {"type": "function_call_output", "id": "fo_1", "call_id": "c", "output": "y", "status": "completed"},
]  # fmt: skip
CALLED = [
    {"type": "thinking", "thinking": "t", "signature": ""},
    {"type": "redacted_thinking", "data": "d"},
    {"type": "text", "text": "x", "citations": None, "cache_control": {"type": "ephemeral"}},
    {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}},
]
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "y", "is_error": True}
TOOL = {"name": "f", "input_schema": {}, "strict": True, "allowed_callers": ["direct"], "eager_input_streaming": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {**RESPONSE, "input": ITEMS}),
        ("/v1/messages", {**MESSAGE, "messages": [TURN, {"role": "assistant", "content": CALLED},
                                                  {"role": "user", "content": [RESULT]}]}),
        ("/v1/messages/count_tokens", {"messages": [TURN], "tools": [TOOL]}),
    ],
)  # fmt: skip
async def test_what_was_answered_is_taken_again(serve, http, path, body):
    """Clients return what they got, here or elsewhere, with all its labels."""
    served = await serve()
    async with http.post(served.url + path, json=body) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    ("path", "body", "unknown", "meant"),
    [
        ("/v1/responses", RESPONSE, {"max_tokens": 5}, "max_output_tokens"),
        ("/v1/responses", RESPONSE, {"messages": [TURN]}, "input"),
        ("/v1/responses", RESPONSE, {"response_format": {"type": "text"}}, "text.format"),
        ("/v1/responses", RESPONSE, {"reasoning_effort": "low"}, "reasoning.effort"),
        ("/v1/messages", MESSAGE, {"max_completion_tokens": 5}, "max_tokens"),
        ("/v1/messages", MESSAGE, {"stop": ["a"]}, "stop_sequences"),
        ("/v1/messages/count_tokens", {"messages": [TURN]}, {"response_format": {}}, "output_config.format"),
    ],
)
async def test_fields_of_a_chat(serve, http, path, body, unknown, meant):
    """Such a field is named as it was sent, and the message says what it is called here."""
    error = await refused(http, (await serve()).url + path, body | unknown)
    (name,) = unknown
    assert (error["param"], error["message"]) == (name, f"{name}: unknown field; did you mean {meant}?")


def test_a_call_that_was_cut_off_is_not_gone_on_from():
    """Its arguments are no JSON, which no template could show, and it has no result."""
    events = ResponseEvents(new_response("resp_1", "m", {}))
    pieces = (("c0", 0, '{"a": 1}'), ("c1", 1, '{"a": '))
    for call_id, index, arguments in pieces:
        call = {"index": index, "id": call_id, "function": {"name": "f", "arguments": arguments}}
        list(events.chunk({"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]}))
    list(events.chunk({"choices": [{"delta": {}, "finish_reason": "length"}]}))
    list(events.end())

    assert [item["status"] for item in events.response["output"]] == ["completed", "incomplete"]
    (message,) = events.messages()
    assert [call["id"] for call in message["tool_calls"]] == ["c0"]
