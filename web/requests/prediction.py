"""Reads the text that a client predicts for the answer (OpenAI's ``prediction``)."""

from __future__ import annotations

from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, Schema, type_name
from pagebus.web.http.limits import MAX_BODY_BYTES, MAX_CONTENT_PARTS
from pagebus.web.requests.chat_messages import CONTENT, read_part

PREDICTION: Schema = {
    "type": "object",
    "properties": {"type": {"const": "content"}, "content": CONTENT},
    "required": ["type", "content"],
    "additionalProperties": False,
}


def read_prediction(fields: Fields) -> str | None:
    """The text, in which parts follow each other without anything between them; None: there is none."""
    given = fields.take("prediction", PREDICTION)
    if given is None:
        return None
    if type(given) is not dict:
        raise bad_field("prediction", f"must be an object, got {type_name(given)}", code="invalid_type")
    parts = Fields(given, "prediction")
    kind = parts.string("type", None, choices=("content",))
    if kind != "content":
        problem = "is required" if kind is None else f"must be 'content', got {kind[:40]!r}"
        raise bad_field("prediction.type", problem)
    content = parts.take("content", CONTENT)
    parts.finish({})
    return _text(content)


def _text(content: object) -> str:
    path = "prediction.content"
    if content is None:
        raise bad_field(path, "is required")
    if isinstance(content, str):
        if len(content) > MAX_BODY_BYTES:
            raise bad_field(path, f"must have at most {MAX_BODY_BYTES} characters")
        return content
    if type(content) is not list:
        raise bad_field(path, f"must be a string or an array of parts, got {type_name(content)}", code="invalid_type")
    if not content or len(content) > MAX_CONTENT_PARTS:
        raise bad_field(path, f"must have 1 to {MAX_CONTENT_PARTS} parts, got {len(content)}")
    return "".join(read_part(part, f"{path}[{index}]") for index, part in enumerate(content))
