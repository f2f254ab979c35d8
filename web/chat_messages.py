"""The ``messages`` of a chat, checked and brought to one form: ``role``, ``content`` (a string), maybe ``name``."""

from __future__ import annotations

from typing import Any

from web.errors import ApiError, bad_field, not_supported
from web.fields import Fields, Schema, type_name
from web.limits import (
    MAX_BODY_BYTES,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TEMPLATE_KWARGS,
    MAX_TEMPLATE_KWARGS_DEPTH,
    MAX_TEMPLATE_KWARGS_NODES,
)

ROLES = ("system", "developer", "user", "assistant")
UNSUPPORTED_ROLES = ("tool", "function")
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
    "refusal": ("",),
    "annotations": ([],),
    "reasoning": ("",),
    "reasoning_content": ("",),
}
"""Fields of OpenAI's messages that mean nothing yet. Clients send an answer back as they got it: with nulls."""
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text", None]}, "text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
CONTENT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _PART]}, "minItems": 1,
         "maxItems": MAX_CONTENT_PARTS},
    ]
}  # fmt: skip
_TEMPLATE_KWARGS: Schema = {
    "maxProperties": MAX_TEMPLATE_KWARGS,
    "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$"},
}
RESERVED_KWARGS = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
     "continue_final_message", "return_dict", "return_tensors", "bos_token", "eos_token"}
)  # fmt: skip
"""What the tokenizer itself gives a template: a client cannot replace it."""


def read_messages(fields: Fields) -> tuple[dict[str, str], ...]:
    """Take ``messages``: at least one, each with a role and text."""
    given = fields.array("messages", max_items=MAX_MESSAGES, min_items=1)
    if not given:
        problem = "is required" if given is None else "must not be empty"
        raise bad_field("messages", problem)
    return tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(given))


def _read_message(message: object, path: str) -> dict[str, str]:
    if type(message) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(message)}", code="invalid_type")
    fields = Fields(message, path)
    role = fields.string("role", None, choices=ROLES)
    if role is None:
        raise bad_field(f"{path}.role", "is required")
    if role in UNSUPPORTED_ROLES:
        raise bad_field(f"{path}.role", f"{role!r} is not supported yet", code="unsupported_parameter")
    if role not in ROLES:
        raise bad_field(f"{path}.role", f"must be one of {', '.join(ROLES)}, got {role[:40]!r}")
    name = fields.string("name", None)
    content = _read_content(fields.take("content", CONTENT), f"{path}.content")
    fields.finish(UNSUPPORTED)
    return {"role": role, "content": content} | ({} if name is None else {"name": name})


def _read_content(content: object, path: str) -> str:
    """A string, or text parts, which are joined by line breaks as vLLM does for templates that want a string."""
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_field(path, "is required")
    if type(content) is not list:
        raise bad_field(path, f"must be a string or an array of parts, got {type_name(content)}", code="invalid_type")
    if not content or len(content) > MAX_CONTENT_PARTS:
        raise bad_field(path, f"must have 1 to {MAX_CONTENT_PARTS} parts, got {len(content)}")
    return "\n".join(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _read_part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if type(part) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(part)}", code="invalid_type")
    fields = Fields(part, path)
    kind = fields.string("type", "text", choices=("text",))
    if kind != "text":
        problem = f"{kind[:40]!r} is not supported yet; only text is"
        raise bad_field(f"{path}.type", problem, code="unsupported_parameter")
    text = fields.string("text", None, max_chars=MAX_BODY_BYTES)
    if text is None:
        raise bad_field(f"{path}.text", "is required")
    fields.finish({})
    return text


def read_template_kwargs(fields: Fields) -> dict[str, object]:
    """Take ``chat_template_kwargs``: a few plain values for the model's template (``enable_thinking`` and the like)."""
    given = fields.object("chat_template_kwargs", _TEMPLATE_KWARGS) or {}
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise bad_field("chat_template_kwargs", f"must have at most {MAX_TEMPLATE_KWARGS} entries, got {len(given)}")
    for key in given:
        if not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise bad_field("chat_template_kwargs", f"{key[:64]!r} cannot be the name of a template variable")
        if key in RESERVED_KWARGS:
            raise not_supported(f"chat_template_kwargs.{key}")
    if _count_nodes(given, MAX_TEMPLATE_KWARGS_DEPTH) > MAX_TEMPLATE_KWARGS_NODES:
        raise bad_field("chat_template_kwargs", f"must hold at most {MAX_TEMPLATE_KWARGS_NODES} values")
    return dict(given)


def _count_nodes(value: object, depth_left: int) -> int:
    """How many values there are, itself included."""
    if not isinstance(value, dict | list):
        return 1
    if depth_left == 0:
        raise _too_deep()
    children = value.values() if isinstance(value, dict) else value
    return 1 + sum(_count_nodes(child, depth_left - 1) for child in children)


def _too_deep() -> ApiError:
    return bad_field("chat_template_kwargs", f"must be nested at most {MAX_TEMPLATE_KWARGS_DEPTH} deep")
