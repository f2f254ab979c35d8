"""Reads items of ``/v1/responses`` as messages of a chat: those of an input, and those of an answer.

Both are read in the same way. A client that sends an answer back in its next input therefore gets the same
conversation as one that names it by ``previous_response_id``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagebus.web.http.errors import bad_field, unsupported_type
from pagebus.web.http.fields import Fields, type_name
from pagebus.web.http.limits import INT32_MAX, MAX_CONTENT_PARTS
from pagebus.web.requests.chat_messages import arguments_in, read_arguments

TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
_LABELS = ("type", "id", "status", "phase", "parsed_arguments")
"""Fields of items without effect: clients return what they got in an answer, OpenAI's with what they parsed of it."""
_PART_LABELS = ("type", "annotations", "logprobs", "prompt_cache_breakpoint", "parsed")
"""The same of parts of a content; every prefix is cached."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"async": (False,), "caller": ({"type": "direct"},), "namespace": ()}
Message = dict[str, Any]


def read_items(items: Iterable[object], path: str) -> list[Message]:
    """The messages that items are, which are at ``path``.

    Items of one answer are one message: its texts, then its calls. An answer of which the model is shown nothing is
    an empty message between others.
    """
    messages: list[Message] = []
    is_silent = False
    for index, item in enumerate(items):
        message = _read_item(item, f"{path}[{index}]")
        said = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if message is None:
            is_silent = bool(messages) and said is None
            continue
        if said is not None and _goes_on(said, item, message):
            _join(said, message)
            continue
        if is_silent and message["role"] != "assistant":
            messages.append(silence())
        messages.append(message)
        is_silent = False
    return messages


def silence() -> Message:
    """An answer that says nothing."""
    return {"role": "assistant", "content": ""}


def _goes_on(said: Message, item: Any, message: Message) -> bool:
    """Whether a message belongs to what the assistant ``said`` before. A text that is no array of parts was written by
    the client: two of them stay apart."""
    is_written = isinstance(item.get("content"), str) and bool(said["content"])
    return message["role"] == "assistant" and not is_written


def _join(said: Message, message: Message) -> None:
    said["content"] += message["content"]
    if calls := message.get("tool_calls"):
        said.setdefault("tool_calls", []).extend(calls)


def _read_item(item: object, path: str) -> Message | None:
    """The message of an item; None: the model is not shown it."""
    if type(item) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(item)}", code="invalid_type")
    fields = Fields(item, path)
    kind = item.get("type", "message")
    read = _ITEMS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise unsupported_type(path, item)
    for name in _LABELS:
        fields.take(name)
    message = read(fields)
    fields.finish(UNSUPPORTED)
    return message


def _read_message(fields: Fields) -> Message:
    role = fields.string("role", None, choices=ROLES)
    if role not in ROLES:
        raise bad_field(fields.path("role"), f"must be one of {', '.join(ROLES)}")
    return {"role": role, "content": _read_content(fields.take("content"), fields.path("content"))}


def _read_call(fields: Fields) -> Message | None:
    """A call. One that was cut off is left out, as no template could show it, and one that is nested too deep to be
    sent on."""
    name, arguments, call_id = fields.string("name", None), fields.take("arguments"), fields.string("call_id", None)
    if name is None:
        raise bad_field(fields.path("name"), "must be that of a function")
    if isinstance(arguments, str):
        if arguments_in(arguments) is None:
            return None
    else:
        read_arguments(arguments, fields.path("arguments"))
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {**silence(), "tool_calls": [call]}


def _read_call_output(fields: Fields) -> Message:
    told, call_id = _read_content(fields.take("output"), fields.path("output")), fields.string("call_id", None)
    if call_id is None:
        raise bad_field(fields.path("call_id"), "must be that of a call")
    return {"role": "tool", "tool_call_id": call_id, "content": told}


def _read_thought(fields: Fields) -> None:
    """What was thought before an answer is not shown to the model again."""
    for name in ("summary", "content", "encrypted_content"):
        fields.take(name)


_ITEMS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "reasoning": _read_thought,
}


def _read_content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if type(content) is not list or len(content) > MAX_CONTENT_PARTS:
        raise bad_field(path, "must be a string or an array of parts", code="invalid_type")
    texts = []
    for index, part in enumerate(content):
        if type(part) is not dict or part.get("type") not in TEXT_PARTS:
            raise unsupported_type(f"{path}[{index}]", part)
        fields = Fields(part, f"{path}[{index}]")
        for name in _PART_LABELS:
            fields.take(name)
        text = fields.string("text", None, max_chars=INT32_MAX)
        if text is None:
            raise bad_field(fields.path("text"), "is required")
        fields.finish({})
        texts.append(text)
    return "".join(texts)
