"""Outputs that have to be something, through the whole system and over HTTP, with the model that comes along."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import pytest_asyncio

import pagebus.actors.shipped_model
from tests.system.serving import Client, serving

FOLDER = Path(pagebus.actors.shipped_model.__file__).parent
ANIMAL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
        "kind": {"enum": ["mammal", "bird", "fish"]},
    },
    "required": ["name", "legs", "kind"],
    "additionalProperties": False,
}
HOSTILE = {"allOf": [{"type": "string", "pattern": f"^.*a.{{{length}}}b.*$"} for length in range(20, 60)]}
MESSAGES = [{"role": "user", "content": "What is a dog?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    async with serving(FOLDER, max_model_len=512, structured_output_timeout_s=2.0) as client:
        yield client


pytestmark = [pytest.mark.share(6), pytest.mark.asyncio(loop_scope="module")]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}


async def test_every_choice_is_valid_and_ends_by_itself(client):
    """Sampled choices differ, each is what the schema asks for, and ends where that is complete."""
    answer = await client.post(
        "chat/completions", messages=MESSAGES, n=4, temperature=1, seed=7, max_tokens=200,
        response_format=schema_format(ANIMAL),
    )  # fmt: skip

    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * 4
    assert all(jsonschema_rs.is_valid(ANIMAL, json.loads(text)) for text in texts)
    assert len(set(texts)) > 1


async def test_a_stream_says_the_same(client):
    """Streamed and whole answers are the same text."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200, "response_format": schema_format(ANIMAL)}

    whole = await client.post("chat/completions", **body)
    chunks = await client.stream("chat/completions", **body)

    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == whole["choices"][0]["message"]["content"]
    assert jsonschema_rs.is_valid(ANIMAL, json.loads(streamed))


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "^[a-c]{3}-[0-9]{2}$"),
        ({"choice": ["yes", "no.", "(perhaps)"]}, r"^(yes|no\.|\(perhaps\))$"),
        ({"grammar": 'root ::= "<" [a-z] [a-z]? ">" | "<>"'}, "^<[a-z]{0,2}>$"),
        ({"grammar": 'start: "x" /[0-9]{2}/'}, "^x[0-9]{2}$"),
    ],
)
async def test_structured_outputs(client, asked, pattern):
    """vLLM's other kinds: an expression, a choice, a grammar in either form."""
    options = {"temperature": 1, "seed": 3, "max_tokens": 100}
    answer = await client.completion("A", **options, structured_outputs=asked)

    assert jsonschema_rs.is_valid({"type": "string", "pattern": pattern}, answer["choices"][0]["text"])


async def test_beside_others(client):
    """An answer without a schema is the same whether others have one or not."""
    alone = await client.completion("What is a dog?", max_tokens=30)
    body = {"temperature": 1, "n": 3, "max_tokens": 60, "structured_outputs": {"json": ANIMAL}}

    beside, _ = await asyncio.gather(client.completion("What is a dog?", max_tokens=30), client.completion("x", **body))

    assert beside["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("response_format.json_schema.schema", {"response_format": schema_format({"type": "strin"})}),
        ("response_format.json_schema.schema", {"response_format": schema_format({"not": {"type": "null"}})}),
        ("response_format.json_schema.schema", {"response_format": schema_format(HOSTILE)}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "(unclosed"}}),
        ("structured_outputs.grammar", {"structured_outputs": {"grammar": "root ::= missing"}}),
        ("guided_regex", {"guided_regex": "(?=ahead)"}),
        ("guided_grammar", {"guided_grammar": 'start: "a" start'}),
    ],
)
async def test_what_cannot_be_served_is_refused(client, field, asked):
    """A schema that is wrong, unknown or too complex is a 400 that names its field; what comes after it is served."""
    error = await client.refused("chat/completions", messages=MESSAGES, **asked)
    answer = await client.completion("x", max_tokens=20, structured_outputs={"choice": ["fine"]})

    assert error["param"] == field
    assert answer["choices"][0]["text"] == "fine"
