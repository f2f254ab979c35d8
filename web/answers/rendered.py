"""A request as its tokens: the answer of ``.../render``, and a body for ``/inference/v1/generate``."""

from __future__ import annotations

from typing import Any

import orjson

from pagebus.bus.messages import SamplingParams, StructuredOutput
from pagebus.web.calls.answer_details import PromptInfo
from pagebus.web.http.errors import bad_field
from pagebus.web.http.limits import MAX_BODY_BYTES
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.sampling import allowed_ids

PLAIN = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "logprobs", "prompt_logprobs",
)  # fmt: skip
LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
ABSENT = (
    "features", "content_parts", "reasoning_ended", "reasoning_parser_kwargs", "return_token_ids",
    "parse_context", "kv_transfer_params", "ec_transfer_params",
)  # fmt: skip
"""Fields that are unknown here and that vLLM sends as null."""


def parameters(parsed: ParsedRequest) -> orjson.Fragment:
    """``sampling_params`` of each prompt of a call, as they are written.

    Raises:
        ApiError: 400, it asks for what `/inference/v1/generate` does not do, or for too much text.
    """
    sampling, details = parsed.sampling, parsed.details
    for name, what, is_asked in (
        ("use_beam_search", "", sampling.beam_width > 0),
        ("best_of", "", details is not None and details.num_choices < sampling.n),
        ("logprobs", "those of tokens that the client names ", details is not None and details.picked),
        ("repetition_detection", "", sampling.repetition_detection is not None),
    ):
        if is_asked:
            problem = f"{what}cannot be rendered: /inference/v1/generate does not take that"
            raise bad_field(name, problem, code="unsupported_parameter")
    written = orjson.dumps(sampling_body(sampling))
    if len(written) * len(parsed.prompts) > MAX_BODY_BYTES:
        problem = f"has so many prompts that their parameters, {len(written)} bytes each, would be too long"
        raise bad_field("prompt", problem)
    return orjson.Fragment(written)


def sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """``sampling_params``, as ``/inference/v1/generate`` reads them."""
    body = {name: getattr(sampling, name) for name in PLAIN}
    body |= {name: list(getattr(sampling, name)) for name in LISTS if getattr(sampling, name)}
    if sampling.allowed_tokens:
        body["allowed_token_ids"] = allowed_ids(sampling.allowed_tokens)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if (output := sampling.structured_output) is not None:
        body["structured_outputs"] = None if output.kind == "anything" else _structured(output)
        body["thinking_token_budget"] = output.thinking_tokens
    return {name: value for name, value in body.items() if value is not None}


def _structured(output: StructuredOutput) -> dict[str, Any]:
    value = orjson.loads(output.text) if output.kind in ("json", "choice") else output.text
    return {output.kind: value, **({} if output.any_whitespace else {"disable_any_whitespace": True})}


def rendered(
    parsed: ParsedRequest, request_id: str, prompt: PromptInfo, sampling_params: orjson.Fragment
) -> dict[str, Any]:
    """One prompt of a call, with the :func:`parameters` of all."""
    options = {"include_usage": parsed.stream_options.usage, "continuous_usage_stats": parsed.stream_options.continuous}
    return {
        "request_id": request_id,
        "token_ids": prompt.ids,
        "token_offsets": prompt.offsets or None,
        "sampling_params": sampling_params,
        "model": parsed.model,
        "output_mode": "tokens",
        "stream": parsed.stream,
        "stream_options": options if parsed.stream else None,
        "cache_salt": parsed.cache_salt,
        "priority": parsed.priority,
        **dict.fromkeys(ABSENT),
    }
