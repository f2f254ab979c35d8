"""A conversation goes on in the same way whether its answers are sent back or named by ``previous_response_id``."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagebus.web.adapters.response_events import ResponseEvents, new_response
from pagebus.web.adapters.response_input import read_response
from pagebus.web.http.errors import ApiError
from tests.web.fake_backend import MODEL
from tests.web.requests.tool_cases import CALL, SERVED, WEATHER, user

TOOL = {"type": "function", **WEATHER["function"]}
USER: dict[str, Any] = {"role": "user", "content": "q"}
NEXT: dict[str, Any] = {"role": "user", "content": "next"}
SILENCE: dict[str, Any] = {"role": "assistant", "content": ""}
TOKENS = len(CALL) // 7 + 1
"""More than the whole answer has: it is told in pieces of 7 characters."""


def messages_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = read_response({"input": list(items)}).chat["messages"]
    return messages


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments, **more}


def part(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": content}


CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID_CALL = {**SILENCE, "tool_calls": [CHAT_CALL]}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CUT_OFF = call('{"city": "Os', status="incomplete")


@pytest.mark.parametrize("limit", range(1, TOKENS + 1))
async def test_answers_that_are_cut_off_anywhere(serve, limit):
    """In what is thought, in the text, in a call, and nowhere: the model is shown the same."""
    served = await serve(model=SERVED)
    asked = user(f"Say: {CALL}")
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        create = client.responses.create
        first = await create(model=MODEL.name, input=[asked], tools=[TOOL], max_output_tokens=limit)
        await create(model=MODEL.name, input="next", tools=[TOOL], previous_response_id=first.id)
        await create(model=MODEL.name, input=[asked, *first.output, NEXT], tools=[TOOL])
    _, named, sent = served.backend.requests
    assert first.status == ("completed" if limit == TOKENS else "incomplete")
    assert named.messages == sent.messages
    assert [each["role"] for each in sent.messages] == ["user", "assistant", "user"]


DELTAS = st.one_of(
    st.sampled_from([{"reasoning": "hm"}, {"content": "So. "}]),
    st.sampled_from(["{}", "", '{"a', "[1]", '{"a": ' + "[" * 99]).map(
        lambda arguments: {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}]}
    ),
)


@given(deltas=st.lists(DELTAS, max_size=6))
def test_answers_of_any_items(deltas: list[dict[str, Any]]) -> None:
    """In any order, with calls that are whole or not."""
    events = ResponseEvents(new_response("r", "m", {}))
    for index, delta in enumerate(deltas):
        calls = [{**each, "index": index} for each in delta.get("tool_calls", [])]
        list(events.chunk({"choices": [{"index": 0, "delta": {**delta, "tool_calls": calls}}]}))
    list(events.end())
    assert messages_of(USER, *events.response["output"], NEXT) == [USER, *events.messages(), NEXT]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([part("a"), call("{}"), call("{}"), part("b")], [{**SILENCE, "content": "ab", "tool_calls": [CHAT_CALL] * 2}]),
        ([{**SILENCE, "content": "a"}, call("{}")], [{**SILENCE, "content": "a", "tool_calls": [CHAT_CALL]}]),
        ([THOUGHT, {**SILENCE, "content": "a"}], [{**SILENCE, "content": "a"}]),
        ([{**SILENCE, "content": "a"}, {**SILENCE, "content": "b"}], [{**SILENCE, "content": each} for each in "ab"]),
        ([call("{}"), NEXT, call("{}")], [SAID_CALL, NEXT, SAID_CALL]),
        ([THOUGHT, CUT_OFF], [SILENCE]),
        ([call('{"city": "Os')], [SILENCE]),
    ],
)
def test_items_of_one_answer_are_one_message(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """Texts that a client has written itself are not joined; what the model cannot be shown leaves an empty answer."""
    assert messages_of(USER, *items, NEXT) == [USER, *messages, NEXT]


def test_nothing_is_made_of_thoughts_at_an_end() -> None:
    """There is no answer before the first question, and none yet behind the last."""
    assert messages_of(THOUGHT, USER, THOUGHT, CUT_OFF) == [USER]


def test_what_follows_a_call_that_was_cut_off_stays() -> None:
    """What its client says of it."""
    said = {"type": "function_call_output", "call_id": "c", "output": "no JSON"}
    told = {"role": "tool", "tool_call_id": "c", "content": "no JSON"}
    assert messages_of(USER, CUT_OFF, said) == [USER, SILENCE, told]


@pytest.mark.parametrize("arguments", [None, 5, ["{}"]])
def test_arguments_that_are_no_text_are_refused(arguments: Any) -> None:
    """By their name: no answer has such."""
    with pytest.raises(ApiError) as caught:
        messages_of(USER, call(arguments))
    assert caught.value.param == "input[1].arguments"
