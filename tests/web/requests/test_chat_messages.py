"""Messages and tools as clients of other APIs write them, and as they send answers back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.requests.tool_cases import WEATHER, chat, refused, user

CACHED: dict[str, Any] = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}


def test_marks_of_what_to_cache_change_nothing():
    """On messages, on parts of their content and on tools: every prefix is cached anyway."""
    part = {"type": "text", "text": "x"}
    messages, tool = [{"role": "user", "content": [part]}], {"type": "function", "function": WEATHER["function"]}
    marked = [{"role": "user", "content": [{**part, **CACHED}], **CACHED}]
    marked_tool = {**tool, **CACHED, "function": {**WEATHER["function"], **CACHED}}

    assert chat(messages=marked, tools=[marked_tool]) == chat(messages=messages, tools=[tool])


def test_what_litellm_keeps_beside_an_answer():
    """It comes back with the answer, in the turn after a call."""
    thoughts = [{"type": "thinking", "thinking": "hm"}]
    kept = {"provider_specific_fields": {"reasoning": None}, "thinking_blocks": thoughts}
    messages = [user("x"), {"role": "assistant", "content": "y", **kept}, user("z")]

    assert [message["content"] for message in chat(messages=messages).prompts[0].messages] == ["x", "y", "z"]


def test_what_openais_client_parsed_of_an_answer():
    """It comes back with the answer, as a model's fields."""
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    call = {"id": "c", "type": "function", "function": function}
    parsed = {**call, "function": {**function, "parsed_arguments": {"city": "Oslo"}}}
    plain = [user("x"), {"role": "assistant", "content": "y", "tool_calls": [call]}]
    back = [user("x"), {"role": "assistant", "content": "y", "tool_calls": [parsed], "parsed": {"a": 1}}]

    assert chat(messages=back) == chat(messages=plain)


def test_the_kind_of_a_message():
    """lm-eval up to 0.4.9 says of each message that it is text."""
    assert chat(messages=[{**user("x"), "type": "text"}]) == chat(messages=[user("x")])


def test_a_refusal_is_text():
    """OpenAI's parts of what the assistant refused are told as vLLM tells them."""
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Sorry."}]

    assert chat(messages=[{"role": "assistant", "content": parts}]).prompts[0].messages[0]["content"] == "No.\nSorry."


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"cache_control": "ephemeral"}, "messages[0].cache_control"),
        ({"provider_specific_fields": []}, "messages[0].provider_specific_fields"),
        ({"type": "image"}, "messages[0].type"),
        ({"thinking_blocks": {}}, "messages[0].thinking_blocks"),
        ({"content": [{"type": "refusal", "text": "No."}]}, "messages[0].content[0].refusal"),
    ],
)
def test_fields_of_wrong_types(more, param):
    """Fields that change nothing have their type nevertheless."""
    assert refused(messages=[{**user("x"), **more}]).param == param
