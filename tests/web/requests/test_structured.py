"""Fields that say what an output has to be: their form, and what they cannot be combined with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagebus.bus.messages import StructuredOutput
from pagebus.web.http.errors import ApiError
from pagebus.web.http.limits import MAX_SCHEMA_BYTES
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest
from tests.web.fake_backend import MODEL

LONG = "y" * MAX_SCHEMA_BYTES
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def completion(**body: Any) -> ParsedRequest:
    return parse_completion({"prompt": "x", **body}, MODEL)


def schema_format(**json_schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", **json_schema}}


def deep(depth: int) -> dict[str, Any]:
    return {"items": deep(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("body", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json", '{"type":"object"}', "response_format"),
        (
            {"response_format": schema_format(schema=SCHEMA, strict=True, description="d")},
            "json", json.dumps(SCHEMA, separators=(",", ":")), "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "json", '{"type":"null"}', "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g", "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True}},
            "json", '{"type":"object"}', "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA}, "json", json.dumps(SCHEMA, separators=(",", ":")), "guided_json"),
        ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "structural_tag", '{"format":{"type":"any_text"}}', "response_format",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["a"]}},
            "structural_tag", '{"structures":[],"triggers":["a"]}', "response_format",
        ),
        (
            {"structured_outputs": {"structural_tag": '{"format": {}}'}},
            "structural_tag", '{"format":{}}', "structured_outputs.structural_tag",
        ),
    ],
)  # fmt: skip
def test_what_is_asked_for(body, kind, text, field):
    """Both endpoints understand OpenAI's names, vLLM's, and those it had before."""
    wanted = StructuredOutput(kind=kind, text=text, field=field)

    assert completion(**body).sampling.structured_output == wanted
    messages = [{"role": "user", "content": "x"}]
    assert parse_chat({"messages": messages, **body}, MODEL).sampling.structured_output == wanted


def test_nothing_asked_for():
    """Text is text."""
    assert completion(response_format={"type": "text"}) == completion()


def test_layout():
    """``disable_any_whitespace`` is for JSON."""
    parsed = completion(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})

    assert parsed.sampling.structured_output.any_whitespace is False


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("response_format.type", {"response_format": {}}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        ("response_format.json_schema.name", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("response_format.json_schema.schema", {"response_format": schema_format(schema=[])}),
        ("response_format.json_schema.schema", {"response_format": schema_format(schema=deep(64))}),
        ("response_format.json_schema.schema", {"response_format": schema_format(schema={"x": LONG})}),
        ("response_format.json_schema.stric", {"response_format": schema_format(stric=True)}),
        ("response_format.json_schema", {"response_format": {"type": "text", "json_schema": {}}}),
        ("structured_outputs", {"structured_outputs": {}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
        ("structured_outputs.json", {"structured_outputs": {"json": "{"}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": ["a", ""]}}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": ""}}),
        ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "x"}}),
        ("response_format.format", {"response_format": {"type": "json_object", "format": {}}}),
        ("guided_regex", {"guided_regex": 5}),
        ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
        ("min_tokens", {"min_tokens": 2, "response_format": {"type": "json_object"}}),
        ("bad_words", {"bad_words": ["x"], "response_format": {"type": "json_object"}}),
        ("allowed_token_ids", {"allowed_token_ids": [1], "response_format": {"type": "json_object"}}),
        ("use_beam_search", {"use_beam_search": True, "n": 2, "guided_regex": "a"}),
    ],
)  # fmt: skip
def test_what_is_refused(param, body):
    """A form that is wrong, too large or too deep, and fields that could leave no token to go on with."""
    with pytest.raises(ApiError) as caught:
        completion(**body)

    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 300
