"""Translates bodies of ``/v1/responses`` to chats."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagebus.web.adapters.field_names import RESPONSE_NAMES
from pagebus.web.adapters.response_items import read_items
from pagebus.web.http.errors import bad_field, unsupported_type
from pagebus.web.http.fields import ONLY_NULL, Fields, Schema, translated, unheard
from pagebus.web.http.limits import INT32_MAX, MAX_CONTENT_PARTS, MAX_MESSAGES
from pagebus.web.requests.chat_messages import EFFORTS
from pagebus.web.requests.openai import METADATA_RULE, is_metadata, parse_chat, parse_prompt
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.requests.tools import CHOICES

Parse = Callable[[dict[str, Any], ServedModel], ParsedRequest]
SAME = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "user", "service_tier", "prompt_cache_key"),
    *("prompt_cache_retention", "safety_identifier", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "stop", "ignore_eos", "min_tokens", "priority", "cache_salt", "logit_bias"),
    *("stop_token_ids", "structured_outputs", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "chat_template_kwargs", "include_reasoning", "timeout"),
)
"""Fields that mean the same in a chat: OpenAI's, then vLLM's."""
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
    *("message.input_image.image_url", LOGPROBS, "reasoning.encrypted_content"),
)
_CHOICE: Schema = {
    "anyOf": [
        {"enum": list(CHOICES)},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
            "additionalProperties": ONLY_NULL,
        },
    ]
}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "context_management": ([],),
    "conversation": (),
    "ec_transfer_params": (),
    "enable_response_messages": (False,),
    "image": (),
    "kv_transfer_params": (),
    "max_tool_calls": (),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "previous_input_messages": (),
    "prompt": (),
    "prompt_cache_options": (),
    "request_id": (),
    "return_mm_kwargs": (False,),
    "session_id": (),
    "truncation": ("disabled",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields of OpenAI's and vLLM's API that come later, with the values that ask for nothing."""


@dataclass(slots=True)
class Wanted:
    """What a body asks for. ``chat`` is the chat without what a ``previous`` response brings; ``shown`` is what the
    response repeats of it; ``items``: the input as items."""

    chat: dict[str, Any]
    items: list[dict[str, Any]]
    instructions: str | None
    previous: str | None
    stream: bool
    background: bool
    store: bool
    shown: dict[str, Any] = field(default_factory=dict)

    def kept(self, before: list[dict[str, Any]]) -> dict[str, Any]:
        """What a record keeps of it, behind the messages ``before``."""
        chat = {name: value for name, value in self.chat.items() if name != "messages"}
        messages = [*before, *self.chat["messages"]]
        return {"items": self.items, "messages": messages, "chat": chat, "instructions": self.instructions}


def parse_kept(kept: Mapping[str, Any], model: ServedModel, parse: Parse = parse_chat) -> ParsedRequest:
    """The chat that is kept like this. Instructions hold for this response only."""
    first = [] if kept["instructions"] is None else [{"role": "system", "content": kept["instructions"]}]
    with translated(RESPONSE_NAMES):
        parsed = parse({**kept["chat"], "messages": [*first, *kept["messages"]]}, model)
    return replace(parsed, names=RESPONSE_NAMES)


def parse_count(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """A body of which only the prompt counts, if it continues no other response."""
    wanted = read_response(data, allow_unknown=model.allow_unknown_fields)
    return parse_kept(wanted.kept([]), model, parse_prompt)


def parse_response(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """A body as a chat, if it continues no other response."""
    wanted = read_response(data, allow_unknown=model.allow_unknown_fields)
    return replace(parse_kept(wanted.kept([]), model), stream=wanted.stream)


def read_response(data: dict[str, Any], *, allow_unknown: bool = False) -> Wanted:
    """Read a body."""
    fields = Fields(data)
    chat: dict[str, Any] = {name: value for name in SAME if (value := fields.take(name)) is not None}
    if (most := fields.integer("max_output_tokens", None, 1, INT32_MAX)) is not None:
        chat["max_completion_tokens"] = most
    metadata = fields.object("metadata")
    if metadata is not None and not is_metadata(metadata):
        raise bad_field("metadata", METADATA_RULE)
    chat |= _read_tools(fields) | _read_text(fields) | _read_reasoning(fields)
    items, messages = read_input(fields)
    chat["messages"] = messages
    chat |= _read_include(fields)
    background, store = fields.boolean("background", False), fields.boolean("store", True)
    if background and not store:
        raise bad_field("store", "must be true with background")
    stream = fields.boolean("stream", False)
    if (options := fields.object("stream_options")) is not None:
        Fields(options, "stream_options").finish({"include_obfuscation": (False,)})
    wanted = Wanted(chat, items, fields.string("instructions", None, max_chars=INT32_MAX),
                    fields.string("previous_response_id", None), stream, background, store)  # fmt: skip
    fields.finish(UNSUPPORTED, allow_unknown=allow_unknown, names=RESPONSE_NAMES)
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    wanted.shown = _shown(wanted, data)
    return wanted


def _shown(wanted: Wanted, data: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer repeats of the body ``data``, of which ``wanted`` was read."""
    chat = wanted.chat
    return {
        "background": wanted.background,
        "instructions": wanted.instructions,
        "max_output_tokens": data.get("max_output_tokens"),
        "metadata": data.get("metadata") or {},
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "previous_response_id": wanted.previous,
        "reasoning": {"effort": chat.get("reasoning_effort"), "summary": None},
        "service_tier": "default",
        "store": wanted.store,
        "text": data.get("text") or {"format": {"type": "text"}},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": data.get("tools") or [],
        "top_logprobs": chat.get("top_logprobs", 0),
        "truncation": "disabled",
        "user": chat.get("user"),
    }


def _read_include(fields: Fields) -> dict[str, Any]:
    """Log probabilities are told if they are to be included; of what else could be, answers here have nothing."""
    given = fields.array("include", max_items=len(INCLUDES), items={"enum": list(INCLUDES)}) or []
    for index, each in enumerate(given):
        if each not in INCLUDES:
            raise bad_field(f"include[{index}]", f"must be one of {', '.join(INCLUDES)}")
    num_top = fields.integer("top_logprobs", 0, -1, INT32_MAX)
    return {"logprobs": True, "top_logprobs": num_top} if LOGPROBS in given else {}


def read_input(fields: Fields) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The input as items, and as messages of a chat."""
    given = fields.take("input", {"type": ["string", "array"], "minItems": 1, "maxItems": MAX_MESSAGES})
    if given is None:
        raise bad_field("input", "is required")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if type(given) is not list or not given:
        raise bad_field("input", "must be a string or an array that is not empty", code="invalid_type")
    if len(given) > MAX_MESSAGES:
        raise bad_field("input", f"must have at most {MAX_MESSAGES} items, got {len(given)}")
    messages = read_items(given, "input")
    return [_shown_item(item) for item in given], messages


def _shown_item(item: dict[str, Any]) -> dict[str, Any]:
    """An item of the input as clients get it back: with an id, and its content as parts."""
    shown = {"type": "message", **item}
    shown.setdefault("id", f"{'msg' if shown['type'] == 'message' else 'item'}_{uuid.uuid4().hex}")
    if shown["type"] == "message":
        shown.setdefault("status", "completed")
        if isinstance(shown["content"], str):
            kind = (
                {"type": "input_text"} if shown["role"] != "assistant" else {"type": "output_text", "annotations": []}
            )
            shown["content"] = [{**kind, "text": shown["content"]}]
    return shown


def _read_tools(fields: Fields) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if tools := fields.array("tools", max_items=MAX_CONTENT_PARTS):
        body["tools"] = []
        for index, tool in enumerate(tools):
            if type(tool) is not dict or tool.get("type") != "function":
                raise unsupported_type(f"tools[{index}]", tool)
            function = {name: value for name, value in tool.items() if name != "type" and value is not None}
            body["tools"].append({"type": "function", "function": function})
    choice = fields.take("tool_choice", _CHOICE)
    if isinstance(choice, dict) and choice.get("type") == "function":
        body["tool_choice"] = unheard(_read_choice, choice)
    elif choice is not None:
        body["tool_choice"] = choice
    return body


def _read_choice(choice: dict[str, Any]) -> dict[str, Any]:
    inner = Fields(choice, "tool_choice")
    inner.take("type")
    name = inner.string("name", None)
    inner.finish({})
    return {"type": "function", "function": {"name": name}}


def _read_text(fields: Fields) -> dict[str, Any]:
    """``text.format`` is a chat's ``response_format``, written flat."""
    given = fields.object("text")
    if given is None:
        return {}
    text = Fields(given, "text")
    form, verbosity = text.object("format") or {"type": "text"}, text.take("verbosity")
    text.finish({})
    body: dict[str, Any] = {} if verbosity is None else {"verbosity": verbosity}
    if form.get("type") == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        return {**body, "response_format": {"type": "json_schema", "json_schema": schema}}
    return body if form == {"type": "text"} else {**body, "response_format": form}


def _read_reasoning(fields: Fields) -> dict[str, Any]:
    given = fields.object("reasoning")
    if given is None:
        return {}
    reasoning = Fields(given, "reasoning")
    effort = reasoning.string("effort", None, choices=EFFORTS)
    reasoning.finish({"summary": ("auto",), "generate_summary": ("auto",)})  # of those there are: here is none
    return {} if effort is None else {"reasoning_effort": effort}
