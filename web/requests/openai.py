"""The bodies of ``/v1/completions`` and ``/v1/chat/completions``.

Each field is supported, or rejected with a 400 that names it: none is silently ignored. ``null`` means "not given".
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Literal

import orjson

from pagebus.bus.messages import Int32Array, SamplingParams
from pagebus.web.http.errors import ApiError, bad_field, model_not_found
from pagebus.web.http.fields import Fields, Harmless, Schema, is_deeper, type_name
from pagebus.web.http.limits import (
    ID_CHARS,
    INT32_MAX,
    MAX_CHOICES,
    MAX_ID_CHARS,
    MAX_JSON_DEPTH,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_METADATA_NAME,
    MAX_NAME_CHARS,
    MAX_PROMPTS,
    MAX_TEMPLATE_CHARS,
    MAX_TIMEOUT_S,
)
from pagebus.web.http.naming import FieldNames, naming
from pagebus.web.requests.beams import check_width, read_beams, wants_beams
from pagebus.web.requests.chat_messages import read_documents, read_messages, read_prediction, read_template_kwargs
from pagebus.web.requests.detail_fields import read_chat_details, read_completion_details
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt, StreamOptions
from pagebus.web.requests.reasoning import read_reasoning, read_thoughts_of_prompt
from pagebus.web.requests.sampling import read_max_tokens, read_sampling, token_array, token_id
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.requests.structured import read_structured
from pagebus.web.requests.tools import read_tools

COMPLETION_MAX_TOKENS = 16
NEWER_NAMES: FieldNames = ((r"max_tokens$", "max_completion_tokens"),)
Side = Literal["left", "right"]

_NEVER: tuple[Any, ...] = ()
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": _NEVER,
    "kv_transfer_params": _NEVER,
    "logits_processors": ([],),
    "mm_payload": ("tensors", "none"),
    "return_mm_kwargs": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": _NEVER,
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
"""Fields of OpenAI's and vLLM's API that come later, with the values that ask for nothing."""
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "prompt_embeds": _NEVER,
    "return_prompt_text": (False,),
    "suffix": ("",),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "audio": _NEVER,
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": _NEVER,
    "verbosity": ("medium",),
    "web_search_options": _NEVER,
}


def _is_name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_NAME_CHARS


def is_metadata(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= MAX_METADATA
        and all(len(name) <= MAX_METADATA_NAME for name in value)
        and all(isinstance(item, str) and len(item) <= MAX_METADATA_CHARS for item in value.values())
    )


METADATA_RULE = (
    f"must hold at most {MAX_METADATA} texts of at most {MAX_METADATA_CHARS} characters, with names of at most "
    f"{MAX_METADATA_NAME}"
)
_NAME: Harmless = (_is_name, f"must be a string of at most {MAX_NAME_CHARS} characters")
HARMLESS: dict[str, Harmless] = {
    "metadata": (is_metadata, METADATA_RULE),
    "prompt_cache_key": _NAME,
    "prompt_cache_retention": _NAME,
    "safety_identifier": _NAME,
    "service_tier": (lambda value: value in ("auto", "default"), "must be 'auto' or 'default': there is one tier"),
    "store": (lambda value: value is False, "must be false: chats are not kept, answers of /v1/responses are"),
    "user": _NAME,
}
"""Fields of OpenAI's API that need no behaviour, with what they may be."""


def parse_json(body: bytes) -> dict[str, Any]:
    """The body as an object. The content type is not looked at: JSON is JSON."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    if type(data) is not dict:
        raise ApiError(400, f"The body must be a JSON object, got {type_name(data)}.", code="invalid_json")
    check_nesting(data, body)
    return data


def check_nesting(data: dict[str, Any], text: str | bytes) -> None:
    """Check that ``data``, parsed from ``text``, can be written to the bus: encoders take less nesting than parsers.

    Raises:
        ApiError: 400, it is nested too deeply.
    """
    brackets = text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    if brackets <= MAX_JSON_DEPTH:
        return
    for name, value in data.items():
        if is_deeper(value, MAX_JSON_DEPTH):
            raise bad_field(name[:100], f"is nested more than {MAX_JSON_DEPTH} deep")


def parse_completion(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /v1/completions``."""
    fields = Fields(data)
    name = read_model(fields, model)
    beams = wants_beams(fields)
    stream, options = _read_stream(fields, model)
    echo = fields.boolean("echo", False)
    max_tokens = read_max_tokens(fields, "max_tokens", COMPLETION_MAX_TOKENS, model, least=0 if echo else 1)
    sampling = read_beams(fields, read_sampling(fields, model, max_tokens=max_tokens), wanted=beams)
    sampling, details = read_completion_details(
        fields, sampling, model, echo=echo, prompt_only=max_tokens == 0, stream=stream
    )
    sampling = read_thoughts_of_prompt(fields, read_structured(fields, sampling), model)
    check_width(sampling, model)
    prompts = read_prompts(fields, "prompt", model.vocab_size)
    if len(prompts) * sampling.n > MAX_CHOICES:
        raise bad_field("n", f"{len(prompts)} prompts times n must be at most {MAX_CHOICES} choices")
    parsed = ParsedRequest(
        model=name,
        prompts=prompts,
        sampling=sampling,
        stream=stream,
        stream_options=options,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        **_read_common(fields, model),
        details=details,
    )
    fields.finish(UNSUPPORTED_COMPLETION, HARMLESS, allow_unknown=model.allow_unknown_fields)
    return parsed


def parse_chat(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /v1/chat/completions``."""
    fields = Fields(data)
    name = read_model(fields, model)
    beams = wants_beams(fields)
    stream, options = _read_stream(fields, model)
    sampling, names = _read_chat_sampling(fields, model)
    sampling = read_structured(fields, read_beams(fields, sampling, wanted=beams))
    check_width(sampling, model)
    messages = read_messages(fields)
    sampling, tools = read_tools(fields, sampling, model)
    template_kwargs = read_template_kwargs(fields)
    sampling, parsing = read_reasoning(fields, sampling, tools.parsing, model, template_kwargs)
    sampling, details = read_chat_details(fields, sampling, messages, parsing, model, stream=stream)
    continues, generates = _read_continuation(fields)
    parsed = ParsedRequest(
        model=name,
        prompts=(Prompt(messages=messages, path="messages"),),
        sampling=sampling,
        stream=stream,
        stream_options=options,
        add_special_tokens=fields.boolean("add_special_tokens", False),
        add_generation_prompt=generates,
        continue_final_message=continues,
        chat_template_kwargs=template_kwargs,
        chat_template=read_template(fields, model),
        tools=tools.told,
        documents=read_documents(fields),
        **_read_common(fields, model),
        details=details,
        prediction=read_prediction(fields),
        names=names,
    )
    fields.finish(UNSUPPORTED_CHAT, HARMLESS, allow_unknown=model.allow_unknown_fields)
    return parsed


def _read_common(fields: Fields, model: ServedModel) -> dict[str, Any]:
    """The fields of a :class:`ParsedRequest` that both kinds of body have, and read alike."""
    return {
        "truncate_prompt_tokens": read_truncation(fields, model),
        "truncation_side": read_truncation_side(fields, "left"),
        "priority": read_priority(fields, model),
        "cache_salt": fields.string("cache_salt", None, empty=False),
        "timeout_s": read_timeout(fields),
        "request_id": read_request_id(fields),
        "token_offsets": fields.boolean("return_token_offsets", False),
    }


def _read_chat_sampling(fields: Fields, model: ServedModel) -> tuple[SamplingParams, FieldNames]:
    """The sampling fields, of which the newer name of ``max_tokens`` counts; and the names that errors are to use."""
    older = read_max_tokens(fields, "max_tokens", None, model)
    newer = read_max_tokens(fields, "max_completion_tokens", None, model)
    names = () if newer is None else NEWER_NAMES
    with naming(names):
        return read_sampling(fields, model, max_tokens=older if newer is None else newer), names


def _read_continuation(fields: Fields) -> tuple[bool, bool]:
    """Whether the last message is continued, and whether the prompt ends with the start of an answer: not both."""
    continues = fields.boolean("continue_final_message", False)
    generates = fields.boolean("add_generation_prompt", True)
    if continues and generates:
        raise bad_field("continue_final_message", "needs add_generation_prompt to be false")
    return continues, generates


def parse_prompt(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of a chat of which only the prompt counts: whether it could be answered is not asked."""
    parsed = parse_chat(data, replace(model, auto_tools=True))
    return replace(parsed, sampling=SamplingParams(), truncate_prompt_tokens=None, token_offsets=False)


def read_model(fields: Fields, model: ServedModel) -> str:
    name = fields.string("model", None, max_chars=INT32_MAX, choices=(*model.names, *model.adapters))
    if name is None:
        return model.name
    if not model.knows(name):
        raise model_not_found(name)
    return name


def read_priority(fields: Fields, model: ServedModel) -> int:
    priority = fields.integer("priority", 0, -INT32_MAX, INT32_MAX)
    if priority and not model.priorities:
        raise bad_field("priority", f"is {priority}, but this server was not started with --scheduling-policy priority")
    return priority


def read_timeout(fields: Fields) -> float | None:
    return fields.number("timeout", None, 0, MAX_TIMEOUT_S, above_low=True)


def read_request_id(fields: Fields) -> str | None:
    """Read the request id, from which the id of the answer is made."""
    given = fields.string("request_id", None, max_chars=MAX_ID_CHARS, empty=False)
    if given is not None and not ID_CHARS.issuperset(given):
        raise bad_field("request_id", "may hold only letters, digits, '-', '_', '.' and ':'")
    return given


def _read_stream(fields: Fields, model: ServedModel) -> tuple[bool, StreamOptions]:
    stream = fields.boolean("stream", False)
    given = fields.object("stream_options")
    interval = fields.integer("stream_interval", 1, 1, INT32_MAX)
    if given is None:
        return stream, StreamOptions(usage=model.forces_usage, interval=interval)
    if not stream:
        raise bad_field("stream_options", "is only allowed when stream is true")
    options = Fields(given, "stream_options")
    usage = options.boolean("include_usage", False) or model.forces_usage
    continuous = options.boolean("continuous_usage_stats", False)
    options.finish({"include_obfuscation": (False,)})
    return stream, StreamOptions(usage, usage and continuous, interval)


def read_template(fields: Fields, model: ServedModel) -> str | None:
    template = fields.string("chat_template", None, max_chars=MAX_TEMPLATE_CHARS, empty=False)
    if template is not None and not model.request_templates:
        problem = "is taken only by servers started with --trust-request-chat-template"
        raise bad_field("chat_template", problem, code="unsupported_parameter")
    return template


def read_truncation(fields: Fields, model: ServedModel) -> int | None:
    """Keep only the last so many tokens of the prompt; -1 means as many as fit, which the tokenizer works out."""
    value = fields.integer("truncate_prompt_tokens", None, -1, INT32_MAX)
    if value == 0:
        raise bad_field("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit, got 0")
    if value is not None and model.max_model_len is not None and value > model.max_model_len:
        raise bad_field("truncate_prompt_tokens", f"must be at most {model.max_model_len}, the maximum context length")
    return value


def read_truncation_side(fields: Fields, default: Side) -> Side:
    """Where a prompt is cut: ``left`` keeps its last tokens, ``right`` its first."""
    side = fields.string("truncation_side", default, choices=("left", "right"))
    if side not in ("left", "right"):
        raise bad_field("truncation_side", f"must be left or right, got {side[:40]!r}")
    return "left" if side == "left" else "right"


@cache
def prompt_schema(vocab_size: int | None, most: int = MAX_PROMPTS) -> dict[str, Any]:
    """The JSON Schema of what :func:`read_prompts` accepts."""
    text, ids = {"type": "string"}, {"type": "array", "items": token_id(vocab_size), "minItems": 1}
    many = ({"type": "array", "items": each, "minItems": 1, "maxItems": most} for each in (text, ids))
    return {"anyOf": [text, ids, *many]}


def read_prompts(
    fields: Fields, name: str, vocab_size: int | None, schema: Schema | None = None, most: int = MAX_PROMPTS
) -> tuple[Prompt, ...]:
    """A string, or ``most`` strings; token ids, or as many lists of them. ``schema``: of what the caller takes in their
    place, too."""
    value = fields.take(name, schema or prompt_schema(vocab_size))
    if value is None:
        raise bad_field(name, "is required")
    if isinstance(value, str):
        return (Prompt(text=value, path=name),)
    if type(value) is not list:
        raise bad_field(name, f"must be a string or an array, got {type_name(value)}", code="invalid_type")
    if not value:
        raise bad_field(name, "must not be empty")
    first = value[0]
    if not isinstance(first, str | list):
        return (Prompt(token_ids=_token_array(value, name, vocab_size), path=name),)
    if len(value) > most:
        raise bad_field(name, f"must have at most {most} prompts, got {len(value)}")
    if isinstance(first, list):
        return tuple(
            Prompt(token_ids=_token_array(ids, path := f"{name}[{index}]", vocab_size), path=path)
            for index, ids in enumerate(value)
        )
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise bad_field(f"{name}[{index}]", f"must be a string like the first, got {type_name(text)}",
                            code="invalid_type")  # fmt: skip
    return tuple(Prompt(text=text, path=f"{name}[{index}]") for index, text in enumerate(value))


def _token_array(ids: Any, name: str, vocab_size: int | None) -> Int32Array:
    if type(ids) is not list:
        raise bad_field(name, f"must be an array of token ids, got {type_name(ids)}", code="invalid_type")
    if not ids:
        raise bad_field(name, "must not be empty")
    return token_array(ids, name, vocab_size)
