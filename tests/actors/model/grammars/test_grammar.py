"""Grammars as llguidance takes them: which texts they let through."""

from __future__ import annotations

from pathlib import Path

import pytest

import pagebus.actors.shipped_model
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.grammars.grammar import (
    GrammarError,
    check_matcher,
    load_vocabulary,
    make_matcher,
    write_grammar,
)
from pagebus.bus.messages import StructuredOutput

FOLDER = Path(pagebus.actors.shipped_model.__file__).parent
VOCABULARY = load_vocabulary(FOLDER, ModelConfig.load(FOLDER))
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


def accepts(output: str, **wanted: object) -> bool:
    """Whether ``output`` is an output that is complete."""
    matcher = make_matcher(VOCABULARY, write_grammar(StructuredOutput(field="test", **wanted)))
    tokens = VOCABULARY.tokenize_str(output)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1}', True),
        ('{ "a": 1 }', True),
        ('{\n    "a": 1\n}', True),
        ('{"a":1', False),
        ('{"a":"1"}', False),
        ('{            "a":1}', False),
        ('{\n\n\n"a":1}', False),
        (' {"a":1}', False),
    ],
)
def test_layouts_of_json(text, expected):
    """Line breaks with indentation and single blanks; nothing endless."""
    assert accepts(text, kind="json", text=SCHEMA) is expected


def test_one_layout():
    """Compact JSON only, if that is asked for."""
    assert accepts('{"a":1}', kind="json", text=SCHEMA, any_whitespace=False)
    assert not accepts('{"a": 1}', kind="json", text=SCHEMA, any_whitespace=False)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", "[0-9]{2}", "12", "123"),
        ("choice", '["a.b", "(c"]', "a.b", "axb"),
        ("choice", '["a.b", "(c"]', "(c", "c"),
        ("grammar", 'root ::= "<" [a-z] ">"', "<a>", "<1>"),
        ("grammar", 'start: "<" /[a-z]/ ">"', "<a>", "<1>"),
    ],
)
def test_other_kinds(kind, text, good, bad):
    """Expressions, choices, grammars in both forms."""
    assert accepts(good, kind=kind, text=text)
    assert not accepts(bad, kind=kind, text=text)


def test_what_cannot_be_written():
    """Is said in words."""
    with pytest.raises(GrammarError, match="missing"):
        write_grammar(StructuredOutput(kind="grammar", text="root ::= missing", field="test"))
    with pytest.raises(GrammarError, match="uniqueItems"):
        make_matcher(
            VOCABULARY, write_grammar(StructuredOutput(kind="json", text='{"uniqueItems": true}', field="test"))
        )


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("grammar", 'start: %regex {"substring_words": ""} x+ <[1]>\nx[capture=""]: x\n', "grammar engine"),
        ("grammar", "start: start", "no output is possible"),
        ("regex", "[^\\x00-\\U0010FFFF]", "no output is possible"),
        ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "recursion"),
        ("grammar", '{\nstart: "a"', "must be a string"),
    ],
)
def test_what_the_engine_cannot_follow(kind, text, problem):
    """Where it gives up, or fails, that is said without its inner state."""
    with pytest.raises(GrammarError, match=problem) as caught:
        check_matcher(make_matcher(VOCABULARY, write_grammar(StructuredOutput(kind=kind, text=text, field="test"))))

    assert "\n   0:" not in str(caught.value)
    assert len(str(caught.value)) < 400
