"""Reads the fields that constrain the whole output: ``response_format``, vLLM's ``structured_outputs`` and its older
names.

Only their form is checked here. The tokenizer decides whether a schema or an expression can be served.
"""

from __future__ import annotations

from typing import Any

import orjson
from msgspec.structs import replace

from pagebus.bus.messages import SamplingParams, StructuredOutput
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, Schema, is_deeper, type_name
from pagebus.web.http.limits import INT32_MAX, MAX_CHOICE_STRINGS, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH

ANY_OBJECT = '{"type":"object"}'
KINDS = ("json", "regex", "choice", "grammar")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
SHAPES: dict[str, Schema] = {
    "json": {"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1}]},
    "regex": {"type": "string", "minLength": 1},
    "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    "grammar": {"type": "string", "minLength": 1},
}
TAG_SHAPES: dict[str, Schema] = {
    "format": {"type": "object"},
    "structures": {"type": "array", "items": {"type": "object"}},
    "triggers": {"type": "array", "items": {"type": "string"}},
}
OLD_NAMES = {f"guided_{kind}": kind for kind in KINDS}
NOT_BESIDE = ("min_tokens", "bad_words", "allowed_token_ids", "use_beam_search")
"""Fields that could leave a structured output without any allowed token."""


def read_structured(fields: Fields, sampling: SamplingParams) -> SamplingParams:
    """Take the fields that say what the output is; at most one may."""
    given = [
        wanted
        for wanted in (
            _read_response_format(fields.object("response_format")),
            _read_structured_outputs(fields.object("structured_outputs")),
            *(read_output(fields.take(name, SHAPES[kind]), kind, name) for name, kind in OLD_NAMES.items()),
        )
        if wanted is not None
    ]
    fields.string("guided_decoding_backend", None)
    if len(given) > 1:
        raise bad_field(given[1].field, f"cannot be combined with {given[0].field}")
    return constrain(sampling, given[0]) if given else sampling


def constrain(sampling: SamplingParams, wanted: StructuredOutput, asked_by: str | None = None) -> SamplingParams:
    """The same with an output that is ``wanted``. ``asked_by``: the field that wants it, if not its own."""
    field = asked_by or wanted.field
    if sampling.structured_output is not None:
        raise bad_field(field, f"cannot be combined with {sampling.structured_output.field}")
    allowed = sampling.allowed_token_ids or sampling.allowed_tokens
    conflicts = (sampling.min_tokens, sampling.bad_words, allowed, sampling.beam_width)
    for name, value in zip(NOT_BESIDE, conflicts, strict=True):
        if value:
            raise bad_field(name, f"cannot be combined with {field}")
    return replace(sampling, structured_output=wanted)


def read_output(value: Any, kind: str, field: str, *, any_whitespace: bool = True) -> StructuredOutput | None:
    """A schema, an expression, strings to choose from, or a grammar; None if it was not given."""
    if value is None:
        return None
    if kind == "json":
        return StructuredOutput(kind="json", text=_schema(value, field), field=field, any_whitespace=any_whitespace)
    if kind == "choice":
        return StructuredOutput(kind="choice", text=_choices(value, field), field=field)
    if not isinstance(value, str):
        raise bad_field(field, f"must be a string, got {type_name(value)}", code="invalid_type")
    if not value:
        raise bad_field(field, "must not be empty")
    _check_size(value.encode("utf-8", "surrogatepass"), field)
    return StructuredOutput(kind="regex" if kind == "regex" else "grammar", text=value, field=field)


def _read_response_format(given: dict[str, Any] | None) -> StructuredOutput | None:
    if given is None:
        return None
    fields = Fields(given, "response_format")
    kind = fields.string("type", None, choices=FORMATS)
    wanted = None
    if kind == "json_object":
        wanted = StructuredOutput(kind="json", text=ANY_OBJECT, field="response_format")
    elif kind == "json_schema":
        wanted = _read_json_schema(fields.object("json_schema"))
    elif kind == "structural_tag":
        wanted = _read_tag_format(fields)
    elif kind != "text":
        shown = "is required" if kind is None else f"must be one of {', '.join(FORMATS)}, got {kind[:40]!r}"
        raise bad_field("response_format.type", shown)
    fields.finish({})
    return wanted


def _read_tag_format(fields: Fields) -> StructuredOutput:
    """The newer form has a ``format``, the older ``structures`` and ``triggers``."""
    names = ("format", "structures", "triggers")
    tag = {name: value for name in names if (value := fields.take(name, TAG_SHAPES[name])) is not None}
    return _tag(tag, "response_format")


def _tag(value: Any, field: str, *, any_whitespace: bool = True) -> StructuredOutput:
    """A structural tag, which may come as text. The tokenizer checks its content."""
    text = _schema(value, field)
    return StructuredOutput(kind="structural_tag", text=text, field=field, any_whitespace=any_whitespace)


def _read_json_schema(given: dict[str, Any] | None) -> StructuredOutput:
    path = "response_format.json_schema"
    if given is None:
        raise bad_field(path, "is required")
    fields = Fields(given, path)
    if fields.string("name", None, empty=False) is None:
        raise bad_field(f"{path}.name", "is required")
    fields.string("description", None, max_chars=INT32_MAX)
    fields.boolean("strict", False)  # the output is valid either way
    wanted = read_output(fields.take("schema", SHAPES["json"]), "json", f"{path}.schema")
    fields.finish({})
    return wanted or StructuredOutput(kind="json", text=ANY_OBJECT, field=path)


def _read_structured_outputs(given: dict[str, Any] | None) -> StructuredOutput | None:
    if given is None:
        return None
    fields, path = Fields(given, "structured_outputs"), "structured_outputs"
    any_whitespace = not fields.boolean("disable_any_whitespace", False)
    wanted = [
        each
        for kind in KINDS
        if (each := read_output(fields.take(kind, SHAPES[kind]), kind, f"{path}.{kind}", any_whitespace=any_whitespace))
        is not None
    ]
    if (tag := fields.take("structural_tag", SHAPES["json"])) is not None:
        wanted.append(_tag(tag, f"{path}.structural_tag", any_whitespace=any_whitespace))
    if fields.boolean("json_object", False):
        field = f"{path}.json_object"
        wanted.append(StructuredOutput(kind="json", text=ANY_OBJECT, field=field, any_whitespace=any_whitespace))
    fields.finish({"disable_additional_properties": (False,), "whitespace_pattern": ()})
    if len(wanted) != 1:
        names = ", ".join((*KINDS, "structural_tag"))
        raise bad_field(path, f"needs exactly one of {names} and json_object, got {len(wanted)}")
    return wanted[0]


def _schema(value: Any, field: str) -> str:
    """A schema as JSON text; it may come as text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise bad_field(field, f"is not valid JSON: {error}") from None
    if type(value) is not dict:
        raise bad_field(field, f"must be an object, got {type_name(value)}", code="invalid_type")
    check_depth(value, field)
    text = orjson.dumps(value)
    _check_size(text, field)
    return text.decode()


def _choices(value: Any, field: str) -> str:
    if type(value) is not list or not all(isinstance(each, str) and each for each in value):
        raise bad_field(field, "must be an array of strings that are not empty", code="invalid_type")
    if not 0 < len(value) <= MAX_CHOICE_STRINGS:
        raise bad_field(field, f"must have 1 to {MAX_CHOICE_STRINGS} strings, got {len(value)}")
    text = orjson.dumps(value)
    _check_size(text, field)
    return text.decode()


def check_depth(value: Any, field: str) -> None:
    """Reject JSON that is nested too deeply."""
    if is_deeper(value, MAX_SCHEMA_DEPTH):
        raise bad_field(field, f"must be nested at most {MAX_SCHEMA_DEPTH} deep")


def _check_size(text: bytes, field: str) -> None:
    if len(text) > MAX_SCHEMA_BYTES:
        raise bad_field(field, f"must have at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
