"""Validates the ``messages`` of a chat and converts them to the form that chat templates expect.

That form has ``role``, ``content`` (a string) and optionally ``name``; tool calls with arguments as objects, tool
results with ``tool_call_id``, and reasoning.
"""

from __future__ import annotations

from typing import Any

import orjson

from pagebus.web.http.errors import bad_field, not_supported
from pagebus.web.http.fields import Fields, Schema, is_deeper, type_name
from pagebus.web.http.limits import (
    MAX_BODY_BYTES,
    MAX_CONTENT_PARTS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_SCHEMA_DEPTH,
    MAX_TEMPLATE_CHARS,
    MAX_TEMPLATE_KWARGS,
    MAX_TEMPLATE_KWARGS_DEPTH,
    MAX_TEMPLATE_KWARGS_NODES,
    MAX_TOOLS,
)
from pagebus.web.requests.structured import check_depth

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED_ROLES = ("function",)
Message = dict[str, Any]
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "audio": (),
    "refusal": ("",),
    "annotations": ([],),
    "type": ("text",),
}
"""Fields of messages without effect: OpenAI's, of which clients return those of answers with nulls, and ``type``, which
lm-eval up to 0.4.9 adds."""
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Where Anthropic's and OpenAI's clients want a prefix cached: every prefix is."""
_PART_TYPES = ("text", "refusal")


def _part(field: str, kinds: list[str | None]) -> Schema:
    marks = {name: {"type": ["object", "null"]} for name in CACHE_MARKS}
    return {
        "type": "object",
        "properties": {"type": {"enum": kinds}, field: {"type": "string"}, **marks},
        "required": [field] if None in kinds else ["type", field],
        "additionalProperties": False,
    }


_PARTS = (_part("text", ["text", None]), _part("refusal", ["refusal"]))
CONTENT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, *_PARTS]}, "minItems": 1,
         "maxItems": MAX_CONTENT_PARTS},
    ]
}  # fmt: skip
_PREDICTION: Schema = {
    "type": "object",
    "properties": {"type": {"const": "content"}, "content": CONTENT},
    "required": ["type", "content"],
    "additionalProperties": False,
}
_TEMPLATE_KWARGS: Schema = {
    "maxProperties": MAX_TEMPLATE_KWARGS,
    "propertyNames": {"pattern": "^[A-Za-z][A-Za-z0-9_]{0,63}$"},
}
_DOCUMENT: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
RESERVED_KWARGS = frozenset(
    {"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt",
     "continue_final_message", "return_dict", "return_tensors", "bos_token", "eos_token"}
)  # fmt: skip
"""Variables that the tokenizer itself gives a template, which a client cannot replace."""


def read_messages(fields: Fields) -> tuple[Message, ...]:
    """Take ``messages``: at least one, each with a role and text."""
    given = fields.array("messages", max_items=MAX_MESSAGES, min_items=1)
    if not given:
        problem = "is required" if given is None else "must not be empty"
        raise bad_field("messages", problem)
    return tuple(read_message(message, f"messages[{index}]") for index, message in enumerate(given))


def read_message(message: object, path: str) -> Message:
    """Read one message, which is at ``path``."""
    if type(message) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(message)}", code="invalid_type")
    fields = Fields(message, path)
    role = fields.string("role", None, choices=ROLES)
    if role is None:
        raise bad_field(f"{path}.role", "is required")
    if role in UNSUPPORTED_ROLES:
        raise bad_field(f"{path}.role", f"{role!r} is not supported: use tool", code="unsupported_parameter")
    if role not in ROLES:
        raise bad_field(f"{path}.role", f"must be one of {', '.join(ROLES)}, got {role[:40]!r}")
    read: Message = {"role": role, "content": ""}
    name = fields.string("name", None)
    calls = _read_calls(fields, path)
    reasoning = [fields.string(each, None, max_chars=MAX_BODY_BYTES) for each in ("reasoning_content", "reasoning")]
    tool_call_id = fields.string("tool_call_id", None)
    content = fields.take("content", CONTENT)
    if content is not None or not calls:
        read["content"] = _read_content(content, f"{path}.content")
    if role != "assistant" and (calls or any(reasoning)):
        field = "tool_calls" if calls else "reasoning_content"
        raise bad_field(f"{path}.{field}", "belongs to messages of the assistant")
    if (role == "tool") != (tool_call_id is not None):
        problem = "must be given in messages of a tool" if role == "tool" else "belongs to messages of a tool"
        raise bad_field(f"{path}.tool_call_id", problem)
    pass_over_cache_marks(fields)
    _pass_over_labels(fields)
    fields.finish(UNSUPPORTED)
    more = {
        "name": name, "tool_calls": calls or None, "tool_call_id": tool_call_id,
        "reasoning_content": reasoning[0] or reasoning[1] or None,
    }  # fmt: skip
    return read | {name: value for name, value in more.items() if value is not None}


def _pass_over_labels(fields: Fields) -> None:
    """Take what clients keep beside an answer and send back with it: litellm what it does not know, and reasoning
    again; OpenAI's ``parse`` the object that the text is."""
    fields.object("provider_specific_fields")
    fields.array("thinking_blocks", max_items=MAX_CONTENT_PARTS)
    fields.take("parsed")


def _read_calls(fields: Fields, path: str) -> list[Message]:
    """Calls that the assistant has made, with arguments as objects: templates write them in their own ways."""
    given = fields.array("tool_calls", max_items=MAX_TOOLS) or []
    return [_read_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(given)]


def _read_call(call: object, path: str) -> Message:
    if type(call) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(call)}", code="invalid_type")
    fields = Fields(call, path)
    fields.take("index")  # of a stream that was put together
    call_id = fields.string("id", None)
    kind = fields.string("type", "function", choices=("function",))
    if kind != "function":
        raise bad_field(f"{path}.type", "must be 'function'")
    function = Fields(fields.object("function") or {}, f"{path}.function")
    name, arguments = function.string("name", None), function.take("arguments", {"type": ["string", "object"]})
    if name is None:
        raise bad_field(f"{path}.function.name", "is required")
    arguments = read_arguments(arguments, f"{path}.function.arguments")
    function.take("parsed_arguments")  # the same once more, of an answer that OpenAI's client has parsed
    function.finish({})
    fields.finish({})
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return read if call_id is None else {"id": call_id, **read}


def read_arguments(arguments: object, path: str) -> dict[str, Any]:
    """The arguments of a call, which come as text. Of a text that holds none, because it was cut off, nothing is shown:
    its client sends it with each turn from now on, so a refusal would end the conversation."""
    if isinstance(arguments, str):
        arguments = arguments_in(arguments) or {}
    if type(arguments) is not dict:
        raise bad_field(path, "must be a JSON object, as text")
    check_depth(arguments, path)
    return arguments


def arguments_in(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None: it is none, or is nested too deep to be sent on."""
    try:
        given = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return None
    return given if type(given) is dict and not is_deeper(given, MAX_SCHEMA_DEPTH) else None


def _read_content(content: object, path: str) -> str:
    """A string, or text parts, which are joined by line breaks as vLLM does for templates that want a string."""
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_field(path, "must be given, unless there are calls of tools")
    if type(content) is not list:
        raise bad_field(path, f"must be a string or an array of parts, got {type_name(content)}", code="invalid_type")
    if not content or len(content) > MAX_CONTENT_PARTS:
        raise bad_field(path, f"must have 1 to {MAX_CONTENT_PARTS} parts, got {len(content)}")
    return "\n".join(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _read_part(part: object, path: str) -> str:
    """The text of one part of a content, which is at ``path``."""
    if isinstance(part, str):
        return part
    if type(part) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(part)}", code="invalid_type")
    fields = Fields(part, path)
    kind = fields.string("type", "text", choices=_PART_TYPES)
    if kind not in _PART_TYPES:
        problem = f"{kind[:40]!r} is not supported: only text is"
        raise bad_field(f"{path}.type", problem, code="unsupported_parameter")
    text = fields.string(kind, None, max_chars=MAX_BODY_BYTES)
    if text is None:
        raise bad_field(f"{path}.{kind}", "is required")
    pass_over_cache_marks(fields)
    fields.finish({})
    return text


def pass_over_cache_marks(fields: Fields) -> None:
    """Take them, in a message, a part of its content, or a tool."""
    for name in CACHE_MARKS:
        fields.object(name)


def read_template_kwargs(fields: Fields) -> dict[str, object]:
    """Take ``chat_template_kwargs``: a few plain values for the model's template (``enable_thinking`` and the like).
    ``reasoning_effort`` is one of them that has a field of its own."""
    effort = fields.string("reasoning_effort", None, choices=EFFORTS)
    if effort not in (None, *EFFORTS):
        raise bad_field("reasoning_effort", f"must be one of {', '.join(EFFORTS)}, got {effort[:40]!r}")
    given = fields.object("chat_template_kwargs", _TEMPLATE_KWARGS) or {}
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise bad_field("chat_template_kwargs", f"must have at most {MAX_TEMPLATE_KWARGS} entries, got {len(given)}")
    for key in given:
        if not key.isidentifier() or key.startswith("_") or len(key) > 64:
            raise bad_field("chat_template_kwargs", f"{key[:64]!r} cannot be the name of a template variable")
        if key in RESERVED_KWARGS:
            raise not_supported(f"chat_template_kwargs.{key}")
    if is_deeper(given, MAX_TEMPLATE_KWARGS_DEPTH):
        raise bad_field("chat_template_kwargs", f"must be nested at most {MAX_TEMPLATE_KWARGS_DEPTH} deep")
    if _count_nodes(given) > MAX_TEMPLATE_KWARGS_NODES:
        raise bad_field("chat_template_kwargs", f"must hold at most {MAX_TEMPLATE_KWARGS_NODES} values")
    if (size := len(orjson.dumps(given))) > MAX_TEMPLATE_CHARS:  # each conversation of a call takes them along
        raise bad_field("chat_template_kwargs", f"must have at most {MAX_TEMPLATE_CHARS} bytes, got {size}")
    return given if effort is None else {"reasoning_effort": effort, **given}


def read_documents(fields: Fields) -> tuple[dict[str, str], ...]:
    """Take ``documents`` for the model's template: objects of strings (``title`` and ``text``)."""
    given = fields.array("documents", max_items=MAX_DOCUMENTS, items=_DOCUMENT) or []
    for index, document in enumerate(given):
        if type(document) is not dict or not all(isinstance(value, str) for value in document.values()):
            raise bad_field(f"documents[{index}]", "must be an object of strings", code="invalid_type")
    return tuple(given)


def _count_nodes(value: object) -> int:
    """The number of values in a JSON value, itself included."""
    if not isinstance(value, dict | list):
        return 1
    return 1 + sum(map(_count_nodes, value.values() if isinstance(value, dict) else value))


def read_prediction(fields: Fields) -> str | None:
    """The text that a client predicts for the answer (OpenAI's ``prediction``); None: there is none. Its parts follow
    each other without anything between them."""
    given = fields.take("prediction", _PREDICTION)
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
    return _predicted_text(content)


def _predicted_text(content: object) -> str:
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
    return "".join(_read_part(part, f"{path}[{index}]") for index, part in enumerate(content))
