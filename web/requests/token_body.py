"""The body of ``POST /inference/v1/generate``: token ids and vLLM's ``sampling_params``.

It is read as a completion, so that both routes give the parameters the same meaning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs

from pagebus.web.http.errors import ApiError, bad_field
from pagebus.web.http.fields import Fields, type_name, unheard
from pagebus.web.requests.openai import parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest
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
    ids = fields.take("token_ids")
    if ids is None:
        raise bad_field("token_ids", "is required")
    if type(ids) is not list or not ids or type(ids[0]) is not int:
        raise bad_field("token_ids", "must be an array of token ids that is not empty", code="invalid_type")
    sampling = fields.object("sampling_params") or {}
    body = {name: value for name in COMMON if (value := fields.take(name)) is not None}
    body |= _sampling(sampling, model)
    for name in ("token_offsets", "parse_context", "return_token_ids", "reasoning_parser_kwargs", "reasoning_ended"):
        fields.take(name)  # of a rendered chat: what they say is about its text, or in the answer anyway
    fields.finish(UNSUPPORTED, allow_unknown=model.allow_unknown_fields)
    try:
        parsed = unheard(parse_completion, {**body, "prompt": ids, "return_token_ids": True}, model)
    except ApiError as error:
        raise _renamed(error) from None
    if sampling.get("max_tokens") is None:
        parsed = replace(parsed, sampling=structs.replace(parsed.sampling, max_tokens=None))
    return parsed


def _sampling(given: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """The fields of a completion that ``sampling_params`` are."""
    told = {name: value for name, value in given.items() if value is not None}
    if not model.allow_unknown_fields and (unknown := sorted(told.keys() - {*SAMPLING, "output_kind"})):
        raise bad_field(f"sampling_params.{unknown[0]}", "is not available", code="unsupported_parameter")
    Fields(given, "sampling_params").integer("output_kind", 0, 0, 2)  # of vLLM's engine; `stream` says it here
    for name in TEXTS if not model.has_tokenizer else ():
        if told.get(name):
            raise bad_field(f"sampling_params.{name}", "needs a tokenizer, which this server does without")
    if told.get("max_tokens") == 0:
        raise bad_field("sampling_params.max_tokens", "must be at least 1, got 0")
    bias = told.get("logit_bias")
    if bias is not None and type(bias) is not dict:
        raise bad_field("sampling_params.logit_bias", f"must be an object, got {type_name(bias)}", code="invalid_type")
    return {name: value for name, value in told.items() if name in SAMPLING}


def _renamed(error: ApiError) -> ApiError:
    """An error of the completion, by the names of this body."""
    param = error.param or ""
    head = param.partition(".")[0].partition("[")[0]
    name = "token_ids" + param[len("prompt") :] if head == "prompt" else param
    if head in SAMPLING:
        name = f"sampling_params.{param}"
    return ApiError(
        error.status, error.message.replace(param, name, 1), param=name or None, code=error.code, headers=error.headers
    )
