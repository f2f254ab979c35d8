"""The body of ``/v1/embeddings``, and embeddings formed from pooled hidden states."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from pagebus.bus.messages import SamplingParams
from pagebus.web.calls.answer_details import AnswerDetails, EmbeddingForm, Float32Array, PromptInfo
from pagebus.web.calls.number_formats import DTYPES, ORDERS, to_bytes
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, Schema
from pagebus.web.http.limits import INT32_MAX, MAX_INPUTS
from pagebus.web.requests.chat_messages import read_template_kwargs
from pagebus.web.requests.conversations import SHAPES, are_messages, read_conversations
from pagebus.web.requests.openai import (
    HARMLESS,
    prompt_schema,
    read_model,
    read_priority,
    read_prompts,
    read_request_id,
    read_template,
    read_timeout,
    read_truncation,
    read_truncation_side,
)
from pagebus.web.requests.parsed_request import ParsedRequest, Prompt, StreamOptions
from pagebus.web.requests.served_model import ServedModel

FORMATS = ("float", "base64", "bytes", "bytes_only")
NO_MEDIA: dict[str, tuple[Any, ...]] = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}
UNSUPPORTED = NO_MEDIA | {"normalize": (True,), "padding": ("do_not_pad",)}
"""Fields of vLLM's API that are not served, with the values that ask for nothing."""
USER = {"user": HARMLESS["user"]}


def parse_embedding(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /v1/embeddings``: of texts or tokens (``input``), or of conversations (in either field)."""
    fields = Fields(data)
    parsed = read_prompts_to_pool(fields, read_model(fields, model), model)
    details = AnswerDetails(prompt_only=True, embedding=read_form(fields, model))
    parsed = with_common_fields(parsed, fields, model, details)
    fields.finish(UNSUPPORTED, USER, allow_unknown=model.allow_unknown_fields)
    return parsed


def read_prompts_to_pool(fields: Fields, name: str, model: ServedModel) -> ParsedRequest:
    """Texts, tokens or conversations, each of which becomes one vector."""
    if fields.peek("messages") is not None:
        if fields.peek("input") is not None:
            raise bad_field("messages", "cannot be given beside input")
        return _read_chats(fields, name, model, read_conversations(fields, "messages", {"anyOf": list(SHAPES)}))
    if are_messages(fields.peek("input")):
        return _read_chats(fields, name, model, read_conversations(fields, "input", _input_schema(model)))
    return _read_input(fields, name, model)


def with_common_fields(
    parsed: ParsedRequest, fields: Fields, model: ServedModel, details: AnswerDetails
) -> ParsedRequest:
    """With truncation, priority, salt, deadline and id."""
    return replace(
        parsed,
        truncate_prompt_tokens=read_truncation(fields, model),
        truncation_side=read_truncation_side(fields, "right"),
        priority=read_priority(fields, model),
        cache_salt=fields.string("cache_salt", None, empty=False),
        timeout_s=read_timeout(fields),
        request_id=read_request_id(fields),
        details=details,
    )


def pooled_request(
    name: str, prompts: tuple[Prompt, ...], model: ServedModel, *, add_special_tokens: bool
) -> ParsedRequest:
    """Parameters that end each sequence after one token, because only the state counts."""
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, pooling=model.pooling, in_one_step=model.in_one_step
    )
    return ParsedRequest(model=name, prompts=prompts, sampling=sampling, stream=False, stream_options=StreamOptions(),
                         add_special_tokens=add_special_tokens, add_generation_prompt=False)  # fmt: skip


def _input_schema(model: ServedModel) -> Schema:
    return {"anyOf": [*prompt_schema(model.vocab_size, MAX_INPUTS)["anyOf"], *SHAPES]}


def _read_input(fields: Fields, name: str, model: ServedModel) -> ParsedRequest:
    prompts = read_prompts(fields, "input", model.vocab_size, _input_schema(model), MAX_INPUTS)
    return pooled_request(name, prompts, model, add_special_tokens=fields.boolean("add_special_tokens", True))


def _read_chats(fields: Fields, name: str, model: ServedModel, prompts: tuple[Prompt, ...]) -> ParsedRequest:
    """Conversations as the template renders them, by default without the beginning of an answer."""
    generates = fields.boolean("add_generation_prompt", False)
    continues = fields.boolean("continue_final_message", False)
    if generates and continues:
        raise bad_field("continue_final_message", "needs add_generation_prompt to be false")
    parsed = pooled_request(name, prompts, model, add_special_tokens=fields.boolean("add_special_tokens", False))
    return replace(
        parsed,
        add_generation_prompt=generates,
        continue_final_message=continues,
        chat_template=read_template(fields, model),
        chat_template_kwargs=read_template_kwargs(fields),
    )


def read_form(fields: Fields, model: ServedModel) -> EmbeddingForm:
    encoding = fields.string("encoding_format", "float", choices=FORMATS)
    dtype = fields.string("embed_dtype", DTYPES[0], choices=DTYPES)
    order = fields.string("endianness", ORDERS[0], choices=ORDERS)
    for field, value, choices in (
        ("encoding_format", encoding, FORMATS), ("embed_dtype", dtype, DTYPES), ("endianness", order, ORDERS)
    ):  # fmt: skip
        if value not in choices:
            raise bad_field(field, f"must be one of {', '.join(choices)}, got {value[:40]!r}")
    dimensions = fields.integer("dimensions", None, 1, model.hidden_size or INT32_MAX)
    if dimensions is not None and model.matryoshka_dimensions and dimensions not in model.matryoshka_dimensions:
        sizes = ", ".join(map(str, model.matryoshka_dimensions))
        raise bad_field("dimensions", f"must be one of those that the model was trained for: {sizes}, got {dimensions}")
    return EmbeddingForm(
        dimensions,
        encoding=encoding,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        order=order,  # type: ignore[arg-type]
        normalize=fields.boolean("use_activation", model.pooler is None or model.pooler.normalize),
    )


def vector_of(state: Float32Array, form: EmbeddingForm) -> Float32Array:
    """The first ``form.dimensions`` numbers of a pooled ``state`` [H], scaled to length 1 unless the form says
    otherwise. A vector of zeros stays one."""
    vector = state[: form.dimensions]
    if not form.normalize:
        return vector
    exact = vector.astype(np.float64)
    return (exact / max(float(np.linalg.norm(exact)), 1e-12)).astype(np.float32)


def as_json(vector: Float32Array, form: EmbeddingForm) -> list[float] | str:
    """A vector as its numbers, or these as bytes in base64."""
    if form.encoding == "float":
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(to_bytes(vector, form.dtype, form.order)).decode()


def state_of(prompt: PromptInfo | None) -> Float32Array:
    """The pooled state [H] of a prompt whose request has ended."""
    assert prompt is not None
    assert prompt.state is not None
    return prompt.state


def as_bytes(vectors: Sequence[Float32Array], form: EmbeddingForm) -> tuple[bytes, list[dict[str, Any]]]:
    """All vectors one after another, and where each lies."""
    pieces, told, start = [], [], 0
    for index, vector in enumerate(vectors):
        pieces.append(to_bytes(vector, form.dtype, form.order))
        place = {"index": index, "embed_dtype": form.dtype, "endianness": form.order}
        told.append({**place, "start": start, "end": start + len(pieces[-1]), "shape": [len(vector)]})
        start += len(pieces[-1])
    return b"".join(pieces), told


def metadata(head: dict[str, Any], told: list[dict[str, Any]], usage: dict[str, Any]) -> str:
    """The header ``metadata`` of an answer whose body is bytes."""
    counts = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
    return orjson.dumps({**head, "data": told, "usage": counts}).decode()
