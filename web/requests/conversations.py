"""Conversations to embed: one, or an array of several, as ``messages`` or in place of texts."""

from __future__ import annotations

from typing import Any

from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, Schema, type_name, unheard
from pagebus.web.http.limits import MAX_INPUTS, MAX_MESSAGES
from pagebus.web.requests.chat_messages import CONTENT, ROLES, read_message
from pagebus.web.requests.parsed_request import Prompt

_MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": {"enum": list(ROLES)}, "content": {"anyOf": [*CONTENT["anyOf"], {"type": "null"}]}},
    "required": ["role"],
}
_CONVERSATION: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}
SHAPES: tuple[Schema, ...] = (
    _CONVERSATION,
    {"type": "array", "items": _CONVERSATION, "minItems": 1, "maxItems": MAX_INPUTS},
)


def are_messages(value: object) -> bool:
    """Whether it begins as a conversation does, or an array of them."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first[0] if isinstance(first, list) and first else first, dict)


def read_conversations(fields: Fields, name: str, schema: Schema) -> tuple[Prompt, ...]:
    """Take a conversation, or an array of them: a prompt for each."""
    given = _listed(fields.take(name, schema), name)
    if not isinstance(given[0], list):
        return (_read(given, name),)
    if len(given) > MAX_INPUTS:
        raise bad_field(name, f"must have at most {MAX_INPUTS} conversations, got {len(given)}")
    return tuple(_read(_listed(each, f"{name}[{index}]"), f"{name}[{index}]") for index, each in enumerate(given))


def _listed(value: Any, path: str) -> list[Any]:
    if value is None:
        raise bad_field(path, "is required")
    if type(value) is not list:
        raise bad_field(path, f"must be an array, got {type_name(value)}", code="invalid_type")
    if not value:
        raise bad_field(path, "must not be empty")
    return value


def _read(given: list[Any], path: str) -> Prompt:
    if len(given) > MAX_MESSAGES:
        raise bad_field(path, f"must have at most {MAX_MESSAGES} items, got {len(given)}")
    messages = (unheard(read_message, message, f"{path}[{index}]") for index, message in enumerate(given))
    return Prompt(messages=tuple(messages), path=path)
