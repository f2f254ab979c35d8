"""Translates Anthropic's Messages requests to chats, and answers of chats to messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from pagebus.web.adapters.field_names import MESSAGE_NAMES
from pagebus.web.adapters.thinking import pass_over_cleared_thoughts, read_effort, read_thinking
from pagebus.web.adapters.translated import Event
from pagebus.web.http.errors import bad_field, unsupported_type
from pagebus.web.http.fields import Fields, Schema, type_name
from pagebus.web.http.limits import INT32_MAX, MAX_CONTENT_PARTS, MAX_MESSAGES

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
ROLES = ("user", "assistant")
TOOL_CHOICES = ("auto", "any", "tool", "none")
TEXT_OR_BLOCKS: Schema = {"type": ["string", "array"]}
SAME = ("model", "stream", "temperature", "top_p", "top_k", "cache_salt")
"""Fields that mean the same in a chat."""
UNSUPPORTED_COUNT: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
    "user_profile_id": (),
    "workspace_id": (),
}
UNSUPPORTED_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
UNSUPPORTED: dict[str, tuple[Any, ...]] = UNSUPPORTED_COUNT | {
    "container": (),
    "diagnostics": (),
    "ec_transfer_params": (),
    "inference_geo": (),
    "kv_transfer_params": (),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
    "service_tier": ("auto", "standard_only"),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields of Anthropic's and vLLM's API that come later, with the values that ask for nothing."""


def read_message(data: dict[str, Any], *, allow_unknown: bool = False) -> dict[str, Any]:
    """The chat that a body asks for."""
    fields = Fields(data)
    body: dict[str, Any] = {name: value for name in SAME if (value := fields.take(name)) is not None}
    body["max_completion_tokens"] = fields.integer("max_tokens", None, 1, INT32_MAX)
    if body["max_completion_tokens"] is None:
        raise bad_field("max_tokens", "is required")
    if (stops := fields.take("stop_sequences")) is not None:
        body["stop"] = stops
    if (metadata := fields.object("metadata")) is not None:
        inner = Fields(metadata, "metadata")
        if (user := inner.string("user_id", None)) is not None:
            body["user"] = user
        inner.finish({})
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    body |= _conversation(fields) | _read_output(fields)
    fields.finish(UNSUPPORTED, allow_unknown=allow_unknown, names=MESSAGE_NAMES)
    return body


def read_count(data: dict[str, Any], *, allow_unknown: bool = False) -> dict[str, Any]:
    """The chat whose tokens are to be counted."""
    fields = Fields(data)
    model = fields.take("model")
    body = _conversation(fields) | _read_output(fields) | ({} if model is None else {"model": model})
    for name in ("thinking_token_budget", "response_format"):
        body.pop(name, None)  # not in the prompt
    fields.finish(UNSUPPORTED_COUNT, allow_unknown=allow_unknown, names=MESSAGE_NAMES)
    return body


def _conversation(fields: Fields) -> dict[str, Any]:
    """Messages and tools, and what the template is told."""
    messages: list[dict[str, Any]] = []
    fields.object("cache_control")  # every prefix is cached
    if (system := fields.take("system", TEXT_OR_BLOCKS)) is not None:
        messages.append({"role": "system", "content": _text(system, "system")})
    given = fields.array("messages", max_items=MAX_MESSAGES)
    if not given:
        raise bad_field("messages", "is required" if given is None else "must not be empty")
    for index, message in enumerate(given):
        messages += _read_turn(message, f"messages[{index}]")
    body: dict[str, Any] = {"messages": messages}
    if messages[-1]["role"] == "assistant":  # its beginning is given: go on
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools := fields.array("tools", max_items=MAX_CONTENT_PARTS):
        body["tools"] = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if (choice := fields.object("tool_choice")) is not None:
        body |= _read_tool_choice(choice)
    pass_over_cleared_thoughts(fields)
    return body | read_thinking(fields)


def _read_output(fields: Fields) -> dict[str, Any]:
    """``output_config``: its ``format`` is a chat's ``response_format``."""
    given = fields.object("output_config")
    if given is None:
        return {}
    output = Fields(given, "output_config")
    form, body = output.object("format"), read_effort(output)
    output.finish({})
    if form is None:
        return body
    inner = Fields(form, "output_config.format")
    kind, schema = inner.string("type", None), inner.object("schema")
    inner.finish({})
    if kind != "json_schema" or schema is None:
        raise bad_field("output_config.format", "must be a json_schema with its schema")
    return {**body, "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}}


def _read_turn(message: Any, path: str) -> list[dict[str, Any]]:
    """One message: perhaps several in a chat, since results of tools are messages there."""
    if type(message) is not dict:
        raise bad_field(path, f"must be an object, got {type_name(message)}", code="invalid_type")
    fields = Fields(message, path)
    role, content = fields.string("role", None, choices=ROLES), fields.take("content", TEXT_OR_BLOCKS)
    if role not in ROLES:
        raise bad_field(f"{path}.role", "must be user or assistant")
    fields.finish({})
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if type(content) is not list:
        raise bad_field(f"{path}.content", "must be a string or an array", code="invalid_type")
    turns: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        where = f"{path}.content[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_block_text(block, where))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_read_call(Fields(block, where)))
        elif kind == "tool_result" and role == "user":
            turns.append(_read_result(Fields(block, where)))
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            _pass_over_thought(Fields(block, where))
        else:
            raise unsupported_type(where, block)
    if texts or calls or not turns:
        turns.append({"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})})
    return turns


def _read_call(block: Fields) -> dict[str, Any]:
    given = block.object("input") or {}
    call = {"name": block.take("name"), "arguments": orjson.dumps(given).decode()}
    read = {"id": block.take("id"), "type": "function", "function": call}
    _finish_block(block)
    return read


def _read_result(block: Fields) -> dict[str, Any]:
    told = _text(block.take("content") or "", block.path("content"))
    block.boolean("is_error", False)  # no template knows it: the content says what went wrong
    read = {"role": "tool", "tool_call_id": block.take("tool_use_id"), "content": told}
    _finish_block(block)
    return read


def _pass_over_thought(block: Fields) -> None:
    """What was thought before an answer is not shown to the model again."""
    for name in ("thinking", "signature", "data"):
        block.string(name, None, max_chars=INT32_MAX)
    _finish_block(block)


def _finish_block(block: Fields) -> None:
    block.take("type")
    block.object("cache_control")  # every prefix is cached
    block.finish({"caller": ({"type": "direct"},), "citations": ([],)})


def _text(content: Any, path: str) -> str:
    """A string, or blocks of text."""
    if isinstance(content, str):
        return content
    if type(content) is not list:
        raise bad_field(path, "must be a string or an array of text blocks", code="invalid_type")
    return "".join(_block_text(block, f"{path}[{index}]") for index, block in enumerate(content))


def _block_text(block: Any, path: str) -> str:
    if type(block) is not dict or block.get("type") != "text":
        raise unsupported_type(path, block)
    fields = Fields(block, path)
    text = fields.string("text", None, max_chars=INT32_MAX)
    if text is None:
        raise bad_field(f"{path}.text", "is required")
    _finish_block(fields)
    return text


def _read_tool(tool: Any, path: str) -> dict[str, Any]:
    if type(tool) is not dict or tool.get("type", "custom") != "custom":
        raise unsupported_type(path, tool)
    fields = Fields(tool, path)
    function = {"name": fields.take("name"), "description": fields.take("description"),
                "parameters": fields.take("input_schema"), "strict": fields.take("strict")}  # fmt: skip
    fields.take("type", {"enum": ["custom"]})
    fields.object("cache_control")  # every prefix is cached
    fields.boolean("eager_input_streaming", False)  # arguments come as the model writes them anyway
    fields.finish(UNSUPPORTED_TOOL)
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _read_tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    fields = Fields(choice, "tool_choice")
    kind, name = fields.string("type", None, choices=TOOL_CHOICES), fields.string("name", None)
    parallel = not fields.boolean("disable_parallel_tool_use", False)
    fields.finish({})
    choices: dict[str | None, Any] = {
        "auto": "auto", "none": "none", "any": "required", "tool": {"type": "function", "function": {"name": name}}
    }  # fmt: skip
    if kind not in choices:
        raise bad_field("tool_choice.type", "must be auto, any, tool or none")
    return {"tool_choice": choices[kind], **({} if parallel else {"parallel_tool_calls": False})}


# -- answers ----------------------------------------------------------------------------------------------------------
def message_of(chat: dict[str, Any]) -> dict[str, Any]:
    """The message that a chat's answer is."""
    choice, usage = chat["choices"][0], chat["usage"]
    said = choice["message"]
    content: list[dict[str, Any]] = []
    if thought := said.get("reasoning") or said.get("reasoning_content"):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said.get("content"):
        content.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls") or []:
        function = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"],
                        "input": _input_of(function["arguments"])})  # fmt: skip
    return {
        **head_of(chat["id"], chat["model"]),
        "content": content or [{"type": "text", "text": ""}],
        **end_of(choice, calls=bool(said.get("tool_calls"))),
        "usage": usage_of(usage),
    }


def _input_of(arguments: str) -> Any:
    """What a call gives, as an object; nothing of one that was cut off, or is none."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return given if isinstance(given, dict) else {}


def head_of(message_id: str, model: str) -> dict[str, Any]:
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def end_of(choice: dict[str, Any], *, calls: bool) -> dict[str, Any]:
    """Why it ended. A message that ends with a call (``calls``) always waits for its result; a chat whose tool was
    named ends with "stop"."""
    stop = choice.get("stop_reason")
    if choice["finish_reason"] == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if choice["finish_reason"] == "stop" and calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": STOP_REASONS.get(choice["finish_reason"], "end_turn"), "stop_sequence": None}


def usage_of(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Tokens read from the cache, and those written to it, are counted apart."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.get("prompt_tokens_details") or {}
    cached, created = (details.get(name) or 0 for name in ("cached_tokens", "created_cache_tokens"))
    return {
        "input_tokens": usage["prompt_tokens"] - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


class MessageEvents:
    """The events of one message: a block is open at a time, of text, thinking or a tool's input."""

    def __init__(self, message_id: str, model: str) -> None:
        self._head = head_of(message_id, model)
        self._begun = False
        self._index = -1
        self._open: tuple[str, int] | None = None
        """Kind of the open block, and which tool call it is."""
        self._calls = False
        self._end: dict[str, Any] = {"stop_reason": "end_turn", "stop_sequence": None}
        self._usage: dict[str, Any] | None = None

    def chunk(self, chunk: dict[str, Any]) -> Iterator[Event]:
        self._usage = chunk.get("usage") or self._usage
        if not self._begun:
            self._begun = True
            message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
            # The whole prompt, as in vLLM; the end of the message has its cached part.
            usage = {"input_tokens": (self._usage or {}).get("prompt_tokens", 0), "output_tokens": 0}
            yield {"type": "message_start", "message": {**message, "usage": usage}}
        for choice in chunk["choices"]:
            yield from self._delta(choice.get("delta") or {})
            if choice.get("finish_reason") is not None:
                self._end = end_of(choice, calls=self._calls)

    def _delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            yield from self._block("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""})
            yield self._part({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            yield from self._block("text", 0, {"type": "text", "text": ""})
            yield self._part({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or []:
            self._calls = True
            function = call.get("function") or {}
            block = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
            yield from self._block("tool_use", call["index"], block)
            if arguments := function.get("arguments"):
                yield self._part({"type": "input_json_delta", "partial_json": arguments})

    def _block(self, kind: str, number: int, block: dict[str, Any]) -> Iterator[Event]:
        """See to it that a block of this kind is open."""
        if self._open == (kind, number):
            return
        yield from self._close()
        self._open = kind, number
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _part(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            self._open = None
            yield {"type": "content_block_stop", "index": self._index}

    def end(self) -> Iterator[Event]:
        yield from self._close()
        yield {"type": "message_delta", "delta": self._end, "usage": usage_of(self._usage)}
        yield {"type": "message_stop"}
