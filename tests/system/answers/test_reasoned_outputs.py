"""A model that reasons first, and outputs that have to be something: through the whole system, with marks as real
tokenizers have them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.actors.model.grammars.test_thoughts import tokenizer_with
from tests.helpers.model_factory import make_model
from tests.helpers.tokenizer_factory import CHAT_TEMPLATE
from tests.system.serving import Client, serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "look"}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello world"}],
    "temperature": 1, "seed": 5, "max_tokens": 200, "thinking_token_budget": 6,
}  # fmt: skip
COSTLY = "start: /[a-z]/ rest\nrest: " + " | ".join(f"/(?s:.*)[a-z]{{{n}}}x{n}/" for n in range(1, 300))
"""Its first token is cheap, and each makes the next one costlier."""
pytestmark = [pytest.mark.share(6), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["added", "special"])
async def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenizer_with(request.param)
    end = tokenizer.token_to_id("</s>")
    make_model(folder, "qwen3", seed=3, vocab_size=tokenizer.get_vocab_size(), eos_token_id=end)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(said))
    options = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    async with serving(folder, max_model_len=512, **options) as client:
        yield client


def is_object(text: str | None) -> bool:
    return text is not None and set(json.loads(text)) == {"a"}


@pytest.mark.parametrize(
    ("asked", "is_good"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, is_object),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, lambda text: re.fullmatch("[ab]{3}", text)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"grammar": 'root ::= "<" [a-c] ">"'}}, lambda text: re.fullmatch("<[a-c]>", text)),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "so"}}},
            lambda text: text == "so",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, is_object),
        ({"tools": [TOOL], "tool_choice": NAMED}, is_object),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_outputs_behind_reasoning(client, asked, is_good, stream):
    """The model thinks, and what comes then is what was asked for."""
    if stream:
        message: dict[str, Any] = {"content": "", "reasoning_content": "", "arguments": ""}
        for chunk in await client.stream("chat/completions", **BODY, **asked):
            delta = chunk["choices"][0]["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                message["arguments"] += call["function"]["arguments"]
    else:
        message = (await client.post("chat/completions", **BODY, **asked))["choices"][0]["message"]
        message["arguments"] = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))

    assert message["reasoning_content"]
    assert is_good(message["arguments"] or message["content"])


async def test_a_budget_of_any_answer(client):
    """The mark comes at the latest behind so many tokens; then the model may write what it likes."""
    answer = await client.post("chat/completions", **{**BODY, "max_tokens": 30}, return_token_ids=True)

    choice = answer["choices"][0]
    tokens = choice["token_ids"]
    assert len(tokens) == 30 or choice["finish_reason"] == "stop"
    unbounded = await client.post(
        "chat/completions", **{**BODY, "max_tokens": 30, "thinking_token_budget": -1}, return_token_ids=True
    )
    others = unbounded["choices"][0]["token_ids"]
    assert tokens[:6] == others[:6]
    assert (tokens[6], choice["message"]["reasoning_content"]) != (
        others[6], unbounded["choices"][0]["message"]["reasoning_content"],
    )  # fmt: skip


@pytest.mark.parametrize("ids", [False, True])
async def test_a_budget_of_completions(client, ids):
    """Counts what the prompt, a text or its tokens, has used up; where the model opens a thought itself, it is bounded,
    too. Beside a structured output that comes behind the thought."""
    tokenizer = tokenizer_with("added")
    opens, closes = (tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    body = {"temperature": 1, "seed": 5, "max_tokens": 40, "thinking_token_budget": 6, "return_token_ids": True}

    async def tokens(prompt: str, **more: Any) -> tuple[list[int], str]:
        given = tokenizer.encode(prompt, add_special_tokens=False).ids if ids else prompt
        answer = await client.post("completions", **{**body, "prompt": given, **more})
        return answer["choices"][0]["token_ids"], answer["choices"][0]["text"]

    for prompt, left in (("Hello<think>", 6), ("Hello<think>abcd", 2), ("Hello<think>abcdefgh", 0)):
        told, _ = await tokens(prompt, ignore_eos=True)
        assert closes in told[: left + 1]
        unbounded, _ = await tokens(prompt, ignore_eos=True, thinking_token_budget=-1)
        assert closes not in unbounded[: left + 1]
        _, text = await tokens(prompt, structured_outputs={"choice": ["yes", "no"]}, skip_special_tokens=True)
        assert text.endswith(("yes", "no"))
    assert (await tokens("Hello", structured_outputs={"choice": ["yes", "no"]}))[1] in ("yes", "no")
    likely = {"logit_bias": {str(opens): 100}, "max_tokens": 12, "thinking_token_budget": 3, "ignore_eos": True}
    told, _ = await tokens("Hello", **likely)
    assert told == [opens, opens, opens, opens, closes] * 2 + [opens, opens]


def function(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "other", "parameters": parameters}}


def schema(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


SECOND = "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("asked", "param", "problem"),
    [
        ({"tools": [TOOL, function(type="strin")], "tool_choice": "required"}, SECOND, "strin"),
        ({"tools": [TOOL, function(type="strin")],
          "tool_choice": {"type": "function", "function": {"name": "other"}}}, SECOND, "strin"),
        ({"tools": [TOOL, function(type="strin")], **schema(type="object")}, SECOND, "strin"),
        ({"tools": [TOOL, function()], **schema(type="objec")}, "response_format.json_schema.schema", "objec"),
    ],
)  # fmt: skip
async def test_which_schema_is_at_fault(client, asked, param, problem):
    """Where a grammar is made of several, the field of the one that cannot be compiled is named, and what is wrong
    with it, but nothing of the grammar around it."""
    error = await client.refused("chat/completions", **BODY, **asked)

    assert (error["param"], error["message"]) == (param, f"{param}: Invalid type: {problem}")


async def test_too_costly_a_grammar_is_the_clients_error(client):
    """Found out while it is followed: a 400, and others are served."""
    costly = {"structured_outputs": {"grammar": COSTLY}}
    error = await client.refused("chat/completions", **{**BODY, "max_tokens": 60}, **costly)
    fine = await client.post("chat/completions", **BODY, structured_outputs={"choice": ["fine"]})

    assert "too complex" in error["message"]
    assert fine["choices"][0]["message"]["content"] == "fine"
