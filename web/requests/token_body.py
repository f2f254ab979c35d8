"""The body of ``POST /inference/v1/generate``: token ids and vLLM's ``sampling_params``.

It is read as a completion, so that both routes give the parameters the same meaning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, translated, type_name
from pagebus.web.http.limits import INT32_MAX
from pagebus.web.http.naming import FieldNames
from pagebus.web.requests.openai import parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.sampling import token_id
from pagebus.web.requests.served_model import ServedModel

SAMPLING = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "spaces_between_special_tokens", "logit_bias", "logprobs", "prompt_logprobs", "bad_words",
    "allowed_token_ids", "structured_outputs", "truncate_prompt_tokens", "detokenize",
    "thinking_token_budget",
)  # fmt: skip
"""Fields of ``sampling_params`` with the same meaning as in a completion."""
COMMON = ("model", "request_id", "cache_salt", "priority", "stream", "stream_options")
"""Beside them."""
NAMES: FieldNames = (
    (r"prompt\b", "token_ids"),
    (rf"({'|'.join(SAMPLING)})\b", r"sampling_params.\1"),
)
"""What the fields of a completion are called here."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "output_mode": ("tokens",),
    "features": (),
    "content_parts": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
}
TEXTS = ("stop", "bad_words", "structured_outputs", "thinking_token_budget")
"""Fields that need a tokenizer."""


def parse_generate(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """Parse the body; answers return token ids."""
    fields = Fields(data)
    ids = fields.take("token_ids", {"type": "array", "items": token_id(model.vocab_size), "minItems": 1})
    if ids is None:
        raise bad_field("token_ids", "is required")
    if type(ids) is not list or not ids or type(ids[0]) is not int:
        raise bad_field("token_ids", "must be an array of token ids that is not empty", code="invalid_type")
    sampling = fields.object("sampling_params") or {}
    body = {name: value for name in COMMON if (value := fields.take(name)) is not None}
    body |= _sampling(sampling, model)
    fields.boolean("return_token_ids", True)  # they are the answer
    for name in ("token_offsets", "parse_context", "reasoning_parser_kwargs", "reasoning_ended"):
        fields.take(name)  # of a rendered chat: what they say is about its text
    fields.finish(UNSUPPORTED, allow_unknown=model.allow_unknown_fields)
    with translated(NAMES):
        parsed = parse_completion({**body, "prompt": ids, "return_token_ids": True}, model)
    if sampling.get("max_tokens") is None:
        parsed = replace(parsed, sampling=structs.replace(parsed.sampling, max_tokens=None))
    return parsed


def _sampling(given: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """The fields of a completion that ``sampling_params`` are."""
    told = {name: value for name, value in given.items() if value is not None}
    if not model.allow_unknown_fields and (unknown := sorted(told.keys() - {*SAMPLING, "output_kind"})):
        raise bad_field(f"sampling_params.{unknown[0]}", "is not available", code="unsupported_parameter")
    fields = Fields(given, "sampling_params")
    fields.integer("max_tokens", None, 1, INT32_MAX)  # without it the context is filled, unlike that of a completion
    for name in SAMPLING:
        if name != "max_tokens":
            fields.take(name)
    fields.integer("output_kind", 0, 0, 2)  # of vLLM's engine; `stream` says it here
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    for name in TEXTS if not model.has_tokenizer else ():
        if told.get(name):
            raise bad_field(f"sampling_params.{name}", "needs a tokenizer, which this server does without")
    bias = told.get("logit_bias")
    if bias is not None and type(bias) is not dict:
        raise bad_field("sampling_params.logit_bias", f"must be an object, got {type_name(bias)}", code="invalid_type")
    return {name: value for name, value in told.items() if name in SAMPLING}
