"""Texts of models, whole and in every way in pieces: content, reasoning, calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagebus.web.calls.parsing.output import OutputParser, Parsing

NAMES = ("get_weather", "search")
HERMES = Parsing(tools="hermes", names=NAMES)
LLAMA = Parsing(tools="llama3_json", names=NAMES)
MISTRAL = Parsing(tools="mistral", names=NAMES)
REQUIRED = Parsing(tools="required", names=NAMES)
NAMED = Parsing(tools="named", names=NAMES, named="search")
DEEPSEEK = Parsing(reasoning="deepseek_r1")
QWEN = Parsing(reasoning="qwen3", tools="hermes", names=NAMES)
PARIS = {"city": "Paris \"}{'", "days": [1, {"n": 2}]}
P = json.dumps(PARIS)


def summary(message: dict[str, Any]) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """(reasoning, content, calls)"""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content"), message["content"], calls


def collected(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of deltas."""
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"function": {"name": call["function"]["name"], "arguments": ""}, "id": call["id"]})
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {**message, "tool_calls": calls}


CASES = [
    (HERMES, "Hello {there}!", None, "Hello {there}!", []),
    (HERMES, "a < b <tool", None, "a < b <tool", []),
    (HERMES, "  text with blanks \n", None, "  text with blanks \n", []),
    (HERMES, f'<tool_call>\n{{"name": "search", "arguments": {P}}}\n</tool_call>', None, None, [("search", P)]),
    (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "search", "arguments": {P}}}\n</tool_call>\n<tool_call>\n'
        f'{{"arguments": {{}}, "name": "get_weather"}}\n</tool_call>\n',
        None, "Let me see.", [("search", P), ("get_weather", "{}")],
    ),
    (HERMES, '<tool_call>{"name": "unheard_of"}</tool_call> done', None, " done", [("unheard_of", "{}")]),
    (HERMES, "<tool_call>not JSON</tool_call>", None, "<tool_call>not JSON</tool_call>", []),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', None, '<tool_call>{"name": 5}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "search", "arguments": {"q": "cut', None, None, [("search", '{"q": "cut')]),
    (
        HERMES, '<tool_call>{"name": "search", "arguments": "{\\"q\\": 1}"}</tool_call>',
        None, None, [("search", '{"q": 1}')],
    ),
    (LLAMA, f'{{"name": "search", "parameters": {P}}}', None, None, [("search", P)]),
    (LLAMA, f'<|python_tag|>{{"name": "search", "parameters": {P}}}', None, None, [("search", P)]),
    (
        LLAMA, '{"name": "search", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}',
        None, None, [("search", "{}"), ("get_weather", '{"a": 1}')],
    ),
    (LLAMA, '{"name": "Bob", "age": 3}', None, '{"name": "Bob", "age": 3}', []),
    (LLAMA, '{"answer": [1, 2]}', None, '{"answer": [1, 2]}', []),
    (LLAMA, 'It is {"name": "search"}.', None, 'It is {"name": "search"}.', []),
    (LLAMA, "< 5", None, "< 5", []),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "search", "arguments": {P}}}]', None, None, [("search", P)]),
    (
        MISTRAL, '[TOOL_CALLS] [{"name": "search", "arguments": {}}, {"name": "get_weather", "arguments": {"a": 1}}]',
        None, None, [("search", "{}"), ("get_weather", '{"a": 1}')],
    ),
    (MISTRAL, f"Well. [TOOL_CALLS]search[ARGS]{P}", None, "Well.", [("search", P)]),
    (MISTRAL, f"[TOOL_CALLS]search{P}get_weather{{}}", None, None, [("search", P), ("get_weather", "{}")]),
    (MISTRAL, "a list: [TOOL", None, "a list: [TOOL", []),
    (
        REQUIRED, f'[{{"name": "search", "parameters": {P}}},\n {{"name": "get_weather", "parameters": {{}}}}]',
        None, None, [("search", P), ("get_weather", "{}")],
    ),
    (NAMED, P, None, None, [("search", P)]),
    (DEEPSEEK, "hm, so</think>\nYes.", "hm, so", "Yes.", []),
    (DEEPSEEK, "<think>\nhm</think>Yes.", "\nhm", "Yes.", []),
    (DEEPSEEK, "never ends </thi", "never ends </thi", "", []),
    (QWEN, "No answer yet", "No answer yet", "", []),
    (QWEN, "\n<think>a <tool> b</think>\n\nYes.", "a <tool> b", "Yes.", []),
    (Parsing(reasoning="qwen3"), "<think>a <tool_call> b</think>Yes.", "a <tool_call> b", "Yes.", []),
    (
        QWEN, f'well <tool_call>\n{{"name": "search", "arguments": {P}}}\n</tool_call>',
        "well ", None, [("search", P)],
    ),
    (
        QWEN, f'<think>t</think>\n\n<tool_call>\n{{"name": "search", "arguments": {P}}}\n</tool_call>',
        "t", None, [("search", P)],
    ),
    (Parsing(reasoning="qwen3", show_reasoning=False), "<think>t</think>Yes.", None, "Yes.", []),
    (
        Parsing(tools="hermes", names=NAMES, most_calls=1),
        '<tool_call>{"name": "search", "arguments": {}}</tool_call><tool_call>{"name": "search"}</tool_call>',
        None, None, [("search", "{}")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("parsing", "text", "reasoning", "content", "calls"), CASES)
def test_whole(parsing, text, reasoning, content, calls):
    """What a whole text says."""
    assert summary(OutputParser(parsing, "key").message(text)) == (reasoning, content, calls)


@pytest.mark.parametrize(("parsing", "text", "reasoning", "content", "calls"), CASES)
def test_pieces(parsing, text, reasoning, content, calls):
    """However a text is cut in two, or character by character: the deltas add up to the same."""
    wanted = (reasoning or "", content or "", calls)
    cuts = [[text[:place], text[place:]] for place in range(len(text) + 1)] + [list(text)]
    for pieces in cuts:
        parser = OutputParser(parsing, "key")
        deltas = [delta for piece in pieces for delta in parser.deltas(piece, ended=False)]
        deltas += parser.deltas("", ended=True)
        assert summary(collected(deltas)) == wanted, pieces


@pytest.mark.parametrize(("parsing", "text", "reasoning", "content", "calls"), CASES)
def test_resumed(parsing, text, reasoning, content, calls):
    """Who has what came of a part of the text gets the rest, and nothing twice: ids of calls are the same."""
    for seen in range(len(text) + 1):
        first, second = OutputParser(parsing, "key"), OutputParser(parsing, "key")
        second.deltas(text[:seen], ended=False)
        deltas = first.deltas(text[:seen], ended=False) + second.deltas(text[seen:], ended=True)
        message = collected(deltas)
        assert summary(message) == (reasoning or "", content or "", calls), seen
        whole = OutputParser(parsing, "key").message(text)
        assert [call["id"] for call in message["tool_calls"]] == [call["id"] for call in whole.get("tool_calls", ())]


def test_arguments_come_as_they_are_written():
    """A client sees arguments grow, and the name before them."""
    parser = OutputParser(HERMES, "key")
    deltas = parser.deltas('<tool_call>{"name": "search", "arguments": {"q": "wha', ended=False)
    deltas += parser.deltas('les"}}</tool_call>', ended=False)

    functions = [delta["tool_calls"][0]["function"] for delta in deltas]
    assert functions == [{"name": "search", "arguments": ""}, {"arguments": '{"q": "wha'}, {"arguments": 'les"}'}]
    assert parser.calls_tools


def test_ids():
    """Calls of other choices have other ids; Mistral's have nine characters."""
    ids = {
        OutputParser(parsing, key).message(text)["tool_calls"][0]["id"]
        for parsing, text in ((NAMED, P), (MISTRAL, f"[TOOL_CALLS]search{P}"))
        for key in ("a", "b")
    }

    assert sorted(map(len, ids)) == [9, 9, 29, 29]
