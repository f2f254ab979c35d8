"""Schemas that the grammar engine would follow to an output that is not valid."""

from __future__ import annotations

import json

import pytest

from pagebus.actors.model.grammars.grammar import GrammarError, make_matcher, write_grammar
from pagebus.bus.messages import StructuredOutput
from tests.actors.model.grammars.test_grammar import VOCABULARY, accepts

LAYOUT = {"x-guidance": {"key_separator": "="}}


def refusal(kind: str, text: str) -> str:
    """Why an output is refused; empty if it is not."""
    try:
        make_matcher(VOCABULARY, write_grammar(StructuredOutput(kind=kind, text=text, field="test"), VOCABULARY))
    except GrammarError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "minimum: 9007199254740993 cannot be kept"),
        ({"type": "integer", "minimum": 1e30}, "minimum"),
        ({"type": "integer", "maximum": 2**53 + 3}, "maximum"),
        ({"type": "integer", "exclusiveMinimum": 2**60}, "exclusiveMinimum"),
        ({"type": "array", "items": {"properties": {"a": {"maximum": 2**53 + 3}}}}, "maximum"),
        ({"type": "integer", "minimum": -(2**53) - 3}, "minimum"),
        ({"properties": {"a": {"type": "null", **LAYOUT}}}, "x-guidance is not supported"),
        ({"enum": [1, 1234567890123456789]}, "enum: 1234567890123456789 cannot be kept"),
        ({"type": "integer", "const": 1e20}, "const"),
        ({"const": {"a": [2**53 + 1]}}, "const"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum: 0 cannot be kept beside a max"),
        ({"exclusiveMinimum": 1.0, "exclusiveMaximum": 1.1}, "exclusiveMinimum"),
        ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "exclusiveMaximum"),
        ({"type": "string", "pattern": "a\\"}, "backslash"),
        ({"type": "object", "patternProperties": {"a\\": True}}, "backslash"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"patternProperties": {"^a$": True}, "additionalProperties": False, "minProperties": 2}, "minProperties"),
    ],
)
def test_what_might_be_invalid_is_refused(schema, problem):
    """Alone and in a structural tag."""
    tag = {"format": {"type": "json_schema", "json_schema": schema}}
    assert problem in refusal("json", json.dumps(schema))
    assert problem in refusal("structural_tag", json.dumps(tag))


@pytest.mark.parametrize(
    ("schema", "output"),
    [
        ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, "9007199254740991"),
        ({"type": "integer", "minimum": 0, "maximum": 2**64}, "5"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5"),
        ({"type": "number", "exclusiveMinimum": -1, "maximum": -0.5}, "-0.7"),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, "1"),
        ({"enum": [9007199254740991]}, "9007199254740991"),
        ({"type": "object", "minProperties": 1}, '{"a":1}'),
        ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, '{"a":1,"b":2}'),
        ({"type": "object", "properties": {"x-guidance": {"type": "null"}}}, '{"x-guidance":null}'),
        ({"const": {"x-guidance": 1, "minimum": "a\\"}}, '{"x-guidance":1,"minimum":"a\\\\"}'),
        ({"type": "string", "pattern": "^a\\\\$"}, '"a\\\\"'),
    ],
)
def test_what_is_certain_is_served(schema, output):
    """Bounds that programs write for all integers, names that are fixed, and what only looks like a keyword."""
    assert refusal("json", json.dumps(schema)) == ""
    assert accepts(output, kind="json", text=json.dumps(schema))


def test_an_expression_that_ends_in_the_middle_is_refused():
    """The engine would drop the backslash."""
    assert "backslash" in refusal("regex", "a\\")
    assert "backslash" in refusal("regex", "\\")
    assert "backslash" in refusal("structural_tag", '{"format": {"type": "regex", "pattern": "a\\\\"}}')
    assert refusal("regex", "a\\\\") == ""


def test_advice_that_nobody_can_follow_is_left_out():
    """The engine's options are not the client's."""
    schema = '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'
    assert refusal("json", schema) == "oneOf constraints are not supported."


def test_layout_within_a_structural_tag():
    """Compact JSON only, if that is asked for."""
    tag = json.dumps({"format": {"type": "json_schema", "json_schema": {"const": {"a": 1}}}})
    assert accepts('{"a": 1}', kind="structural_tag", text=tag)
    assert not accepts('{"a": 1}', kind="structural_tag", text=tag, any_whitespace=False)
    assert accepts('{"a":1}', kind="structural_tag", text=tag, any_whitespace=False)


@pytest.mark.parametrize(
    ("name", "output", "expected"),
    [
        ("time", "23:59:59Z", True),
        ("time", "23:59:60Z", False),
        ("date-time", "2024-02-29T12:00:59.5+01:00", True),
        ("date-time", "2024-02-28T12:00:60Z", False),
        ("date-time", "1900-02-29T12:00:00Z", False),
        ("date", "2024-02-29", True),
        ("date", "2000-02-29", True),
        ("date", "1900-02-29", False),
        ("date", "2023-02-29", False),
        ("date", "2023-12-31", True),
        ("date", "2023-02-28", True),
    ],
)
def test_dates_and_times_exist(name, output, expected):
    """So that programs can read them; also beside other expressions."""
    for more in ({}, {"pattern": "^[12]"}, {"allOf": [{"minLength": 9}]}):
        schema = json.dumps({"type": "string", "format": name, **more})
        assert accepts(f'"{output}"', kind="json", text=schema) is expected
