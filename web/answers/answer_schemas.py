"""JSON Schemas of answers, as far as clients may rely on them. Tests validate real answers against them."""

from __future__ import annotations

from typing import Any

from pagebus.web.http.fields import Schema

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TIME: Schema = {"type": "integer", "description": "Seconds since 1970."}
OBJECT: Schema = {"type": "object"}


def record(**properties: Schema) -> dict[str, Any]:
    """Schema of an object with all of these properties, and maybe more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def array(items: Schema) -> dict[str, Any]:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = record(error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=COUNT, reason=nullable(TEXT)))
USAGE = record(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
_END: dict[str, Schema] = {
    "index": COUNT,
    "finish_reason": {"enum": ["stop", "length", "tool_calls", "repetition", None]},
    "stop_reason": {"type": ["string", "integer", "null"]},
    "logprobs": nullable(OBJECT),
}


def generated(kind: str, choice: Schema) -> dict[str, Any]:
    """Schema of the whole answer of an endpoint that generates."""
    head = {"id": TEXT, "object": {"const": kind}, "created": TIME, "model": TEXT}
    return record(**head, choices=array(choice), usage=USAGE)


COMPLETION = generated("text_completion", record(**_END, text=TEXT))
CHAT = generated(
    "chat.completion",
    record(**_END, message=record(role={"const": "assistant"}, content=nullable(TEXT), refusal=nullable(TEXT))),
)
MODEL = record(id=TEXT, object={"const": "model"}, created=TIME, owned_by=TEXT, max_model_len=nullable(COUNT))
MODELS = record(object={"const": "list"}, data=array(MODEL))
ANTHROPIC_MODEL = record(type={"const": "model"}, id=TEXT, display_name=TEXT, created_at=TEXT)
ANTHROPIC_MODELS = record(data=array(ANTHROPIC_MODEL), has_more={"type": "boolean"})
STATUS = record(status={"enum": ["ok", "unavailable", "paused"]})
