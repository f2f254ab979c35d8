"""The bodies of ``/score`` and ``/rerank``: texts whose likeness to others, or relevance, is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.pooled_forms import Activation, ScoreForm
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, Schema, type_name
from pagebus.web.http.limits import INT32_MAX, MAX_CHOICES, MAX_TEMPLATE_CHARS
from pagebus.web.requests.chat_messages import read_template_kwargs
from pagebus.web.requests.embeddings import NO_MEDIA, USER, pooled_request, with_common_fields
from pagebus.web.requests.openai import read_model
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt
from pagebus.web.requests.served_model import ServedModel

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""By what names vLLM takes the two sides."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = NO_MEDIA | {
    "max_tokens_per_query": (0,), "max_tokens_per_doc": (0,), "padding": ("do_not_pad",),
}  # fmt: skip
_PART: Schema = {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}}
ONE: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}, "content": {"type": "array", "items": _PART}}},
    ]
}
Texts = tuple[Prompt, ...]
MANY: Schema = {"type": "array", "items": ONE, "minItems": 1, "maxItems": MAX_CHOICES}


def parse_score(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /score``: two texts, one and several, or as many on both sides."""
    fields = Fields(data)
    name = read_model(fields, model)
    left, right = _sides(fields)
    first, second = _texts(fields, left), _texts(fields, right)
    if len(first) not in (1, len(second)):
        raise bad_field(
            left, f"has {len(first)} texts and {right} {len(second)}: give one, or as many as the other has"
        )
    parsed = _parsed(fields, name, model, first, second, ScoreForm())
    fields.finish(UNSUPPORTED, USER, allow_unknown=model.allow_unknown_fields)
    return parsed


def _sides(fields: Fields) -> tuple[str, str]:
    """The pair of names of which both are there; else of which one is, so that the other is missed."""
    there = {pair: sum(fields.peek(side) is not None for side in pair) for pair in PAIRS}
    return max(PAIRS, key=lambda pair: there[pair])


def parse_rerank(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /rerank``, as Jina and Cohere have it: documents that a query is compared with."""
    fields = Fields(data)
    name = read_model(fields, model)
    query, documents = _text(fields.take("query", ONE), "query"), _texts(fields, "documents")
    top_n = fields.integer("top_n", 0, 0, INT32_MAX)
    texts = tuple(document.text or "" for document in documents)
    form = ScoreForm(documents=texts, top_n=top_n, with_texts=fields.boolean("return_documents", True))
    parsed = _parsed(fields, name, model, (query,), documents, form)
    fields.finish(UNSUPPORTED, USER, allow_unknown=model.allow_unknown_fields)
    return parsed


def _parsed(
    fields: Fields, name: str, model: ServedModel, first: Texts, second: Texts, form: ScoreForm
) -> ParsedRequest:
    """Pairs for a model that scores them, else all texts, to be embedded."""
    pooler, activates = model.pooler, fields.boolean("use_activation", True)
    activation: Activation = pooler.activation if pooler is not None and activates else "none"
    if pooler is not None and pooler.classifies:
        firsts = first * len(second) if len(first) == 1 else first
        prompts = tuple(_pair(one, other, model) for one, other in zip(firsts, second, strict=True))
        num_queries = None
    else:
        prompts, num_queries = first + second, len(first)
    if len(prompts) > MAX_CHOICES:
        raise bad_field("documents" if form.documents else "text_2", f"must have at most {MAX_CHOICES} items")
    form = ScoreForm(num_queries, activation, form.documents, form.top_n, form.with_texts)
    parsed = pooled_request(name, prompts, model, add_special_tokens=True)
    parsed = replace(parsed, chat_template_kwargs=_template_kwargs(fields, model))
    return with_common_fields(parsed, fields, model, AnswerDetails(prompt_only=True, score=form))


def _template_kwargs(fields: Fields, model: ServedModel) -> dict[str, object]:
    """What the server's template is told besides the two texts."""
    instruction = fields.string("instruction", None, max_chars=MAX_TEMPLATE_CHARS)
    given = read_template_kwargs(fields)
    if (given or instruction is not None) and not (model.has_score_template and model.pooler is not None):
        name = "chat_template_kwargs" if given else "instruction"
        raise bad_field(name, "is for the template of a reranker that the server was started with (--chat-template)")
    return given if instruction is None else {"instruction": instruction, **given}


def _pair(query: Prompt, document: Prompt, model: ServedModel) -> Prompt:
    """By the server's template, as the tokenizer joins a pair, or one text behind the other."""
    one, other, path = query.text or "", document.text or "", document.path
    if model.has_score_template:
        messages = ({"role": "query", "content": one}, {"role": "document", "content": other})
        return Prompt(messages=messages, path=path)
    if model.pooler is not None and model.pooler.joined:
        return Prompt(text=one + other, path=path)
    return Prompt(text=one, second_text=other, path=path)


def _texts(fields: Fields, name: str) -> Texts:
    value = fields.take(name, {"anyOf": [ONE, MANY]})
    if value is None:
        raise bad_field(name, "is required")
    if type(value) is not list:
        return (_text(value, name),)
    if not value:
        raise bad_field(name, "must not be empty")
    if len(value) > MAX_CHOICES:
        raise bad_field(name, f"must have at most {MAX_CHOICES} items, got {len(value)}")
    return tuple(_text(each, f"{name}[{index}]") for index, each in enumerate(value))


def _text(value: Any, path: str) -> Prompt:
    """A text, ``{"text": ...}``, or vLLM's ``{"content": [{"type": "text", "text": ...}]}``."""
    if value is None:
        raise bad_field(path, "is required")
    if isinstance(value, str):
        return Prompt(text=value, path=path)
    if type(value) is not dict:
        raise bad_field(path, f"must be a string or an object with text, got {type_name(value)}", code="invalid_type")
    if isinstance(value.get("text"), str) and len(value) == 1:
        return Prompt(text=value["text"], path=path)
    parts = value.get("content")
    if len(value) == 1 and isinstance(parts, list) and parts and all(_is_text(part) for part in parts):
        return Prompt(text="\n".join(part["text"] for part in parts), path=path)
    raise bad_field(path, "must be a string or an object with text and nothing else: models here read text only")


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
