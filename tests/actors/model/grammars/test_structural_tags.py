"""Structural tags: which texts they let through, with marks that are tokens and with marks that are text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagebus.actors.model.grammars.grammar import GrammarError
from tests.actors.model.grammars.test_thoughts import Model, model  # noqa: F401

ARGUMENTS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA = {"type": "json_schema", "json_schema": ARGUMENTS}
ANY = {"type": "any_text"}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def triggered(*tags: dict[str, Any], triggers: tuple[str, ...] = ("<f=",), **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **more}


F, G = tag("<f=one>", SCHEMA, "</f>"), tag("<f=two>", ANY, ["</f>", "<end>"])
THINK = tag("<think>", ANY, "</think>")
CASES = [  # (format, what it lets through, what it does not)
    (const("so </think> it"), ["so </think> it"], ["so"]),
    (SCHEMA, ['{"a": 1}'], ['{"a": "b"}', ""]),
    ({"type": "regex", "pattern": "a/[0-9]"}, ["a/5"], ["a/b"]),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]+'}, ["x12"], ["y"]),
    (ANY, ["", "anything\n{"], []),
    ({**ANY, "excludes": ["bad", "</x"]}, ["good"], ["very bad", "</x>"]),
    (sequence(THINK, SCHEMA), ['<think>hm < </think>{"a": 1}'], ['<think>hm{"a": 1}', '{"a": 1}']),
    (sequence(ANY, const("END"), SCHEMA), ['wellEND{"a": 1}'], ['well{"a": 1}']),
    (sequence(THINK, triggered(F)), ['<think>t</think>a<f=one>{"a":1}</f>b'], ["<think>t</think>a<f=one>b"]),
    ({"type": "or", "elements": [const("yes"), const("no"), SCHEMA]}, ["yes", "no", '{"a":2}'], ["yesno", "maybe"]),
    (triggered(F, G), ["", "text < only", 'a<f=one>{"a": 1}</f>b<f=two>x<end>c', "<f=two>a</f>"],
     ["<f=one>x</f>", "<f=three>", "a<f=", "<f=two>x"]),
    (triggered(F, at_least_one=True), ['<f=one>{"a": 1}</f>', '<f=one>{"a": 1}</f> so <f=one>{"a": 1}</f>'],
     ["", 'a<f=one>{"a": 1}</f>']),
    (triggered(F, stop_after_first=True), ['a<f=one>{"a": 1}</f>'], ['a<f=one>{"a": 1}</f>b']),
    (triggered(tag("<think>x", SCHEMA, "</think>"), triggers=("<think>",)), ['a<think>x{"a": 1}</think>b'],
     ['a<think>{"a": 1}</think>']),
    ({"type": "tags_with_separator", "tags": [F], "separator": ", "},
     ["", '<f=one>{"a": 1}</f>, <f=one>{"a": 1}</f>'], ['<f=one>{"a": 1}</f>,', "x"]),
    ({"type": "tags_with_separator", "tags": [F], "separator": "", "at_least_one": True, "stop_after_first": True},
     ['<f=one>{"a": 1}</f>'], ["", '<f=one>{"a": 1}</f><f=one>{"a": 1}</f>']),
    ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
    ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
    ({"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
    ({"type": "repeat", "min": 1, "max": -1, "content": const("a")}, ["aaaaa"], [""]),
    (sequence(), [""], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "good", "bad"), CASES)
def test_formats(model: Model, form, good, bad):  # noqa: F811
    """The same texts, whatever the marks are to the tokenizer."""
    wanted = {"kind": "structural_tag", "text": json.dumps({"type": "structural_tag", "format": form})}

    assert [text for text in good if not model.accepts(text, **wanted)] == []
    assert [text for text in bad if model.accepts(text, **wanted)] == []


def test_the_older_form(model: Model):  # noqa: F811
    """``structures`` and ``triggers``, as vLLM and OpenAI's clients have sent them."""
    structures = [{"begin": "<f=one>", "schema": ARGUMENTS, "end": "</f>"}]
    text = json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["<f="]})

    assert model.accepts('So: <f=one>{"a": 5}</f> ok', kind="structural_tag", text=text)
    assert not model.accepts('So: <f=one>{"a": "x"}</f>', kind="structural_tag", text=text)


def test_tokens_by_name_and_by_number(model: Model):  # noqa: F811
    """A token that is apart from text can be named; others cannot."""
    mark = model.token("</think>")
    form = sequence({"type": "any_tokens", "max_tokens": 3, "exclude_tokens": ["</think>"]},
                    {"type": "token", "token": "</think>"})  # fmt: skip
    wanted = {"kind": "structural_tag", "text": json.dumps({"format": form})}
    if mark is None:
        with pytest.raises(GrammarError, match="no token"):
            model.matcher(**wanted)
        return

    assert model.matcher(**wanted).try_consume_tokens([*model.spelled("so"), mark]) == 3
    assert model.matcher(**wanted).try_consume_tokens([*model.spelled("longer"), mark]) == 3


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ([], "must be an object"),
        ({}, "needs a format"),
        ({"format": {"type": "unheard_of"}}, "'unheard_of' is not supported"),
        ({"format": {"type": ["or"]}}, "is not supported"),
        ({"format": {"type": "const_string"}}, "format.value must be a string"),
        ({"format": {"type": "sequence", "elements": [{"type": "tag", "begin": "a"}]}}, r"elements\[0\].end"),
        ({"format": sequence(ANY, SCHEMA)}, "must be a fixed one"),
        ({"format": triggered(F, triggers=("<g",))}, "exactly one"),
        ({"format": {**SCHEMA, "style": "qwen_xml"}}, "format.style"),
        ({"format": {"type": "repeat", "min": 3, "max": 1, "content": ANY}}, "min and max"),
        ({"structures": [5], "triggers": ["a"]}, r"structures\[0\].begin"),
        ({"format": {"type": "or", "elements": []}}, "nothing"),
        ({"format": {**ANY, "exclude": ["a"]}}, r"format\.exclude is not supported"),
        ({"format": {"type": "regex", "pattern": "a", "excludes": ["b"]}}, r"format\.excludes is not supported"),
        ({"format": triggered({**F, "stop": 1})}, r"format\.tags\[0\]\.stop is not supported"),
        ({"format": ANY, "strict": True}, r"structural_tag\.strict is not supported"),
        ({"structures": [{"begin": "a", "end": "b", "stop": 1}], "triggers": ["a"]}, r"structures\[0\]\.stop is not"),
    ],
)
def test_what_is_refused(model: Model, tag, problem):  # noqa: F811
    """With the place of what is wrong."""
    with pytest.raises(GrammarError, match=problem):
        model.matcher(kind="structural_tag", text=json.dumps(tag))
