"""Embeddings: the body of ``/v1/embeddings``, and how a pooled hidden state is told."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from bus.messages import SamplingParams
from web.asked import Asked, StreamOptions
from web.errors import bad_field
from web.fields import Fields
from web.limits import INT32_MAX, MAX_CHOICES
from web.model import ServedModel
from web.report import EmbeddingForm, Float32Array, Report
from web.schemas import (
    HARMLESS,
    read_model,
    read_priority,
    read_prompts,
    read_request_id,
    read_timeout,
    read_truncation,
)

FORMATS = ("float", "base64")
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "messages": (),
    "mm_processor_kwargs": ({},),
    "normalize": (True,),
    "padding": ("do_not_pad",),
    "truncation_side": ("left",),
    "use_activation": (True,),
}
"""Fields of vLLM's API that are not served, with the values that ask for nothing."""


def parse_embedding(data: dict[str, Any], model: ServedModel) -> Asked:
    """The body of ``POST /v1/embeddings``."""
    fields = Fields(data)
    name = read_model(fields, model)
    prompts = read_prompts(fields, "input", model.vocab_size)
    if len(prompts) > MAX_CHOICES:
        raise bad_field("input", f"must have at most {MAX_CHOICES} items, got {len(prompts)}")
    encoding = fields.string("encoding_format", "float", choices=FORMATS)
    if encoding not in FORMATS:
        raise bad_field("encoding_format", f"must be one of {', '.join(FORMATS)}")
    dimensions = fields.integer("dimensions", None, 1, model.hidden_size or INT32_MAX)
    asked = Asked(
        model=name,
        prompts=prompts,
        # One token ends the sequence; the state is what counts.
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=model.pooling),
        stream=False,
        stream_options=StreamOptions(),
        add_special_tokens=fields.boolean("add_special_tokens", True),
        truncate_prompt_tokens=read_truncation(fields, model),
        priority=read_priority(fields, model),
        cache_salt=fields.string("cache_salt", None, empty=False),
        timeout_s=read_timeout(fields),
        request_id=read_request_id(fields),
        report=Report(prompt_only=True, embedding=EmbeddingForm(dimensions, encoding == "base64")),
    )
    fields.finish(UNSUPPORTED, {"user": HARMLESS["user"]}, allow_unknown=model.allow_unknown_fields)
    return asked


def embedding(state: Float32Array, form: EmbeddingForm) -> list[float] | str:
    """A pooled ``state`` [H] as a vector of length 1, of its first ``form.dimensions`` numbers; in base64 as float32,
    little-endian. A vector of zeros stays one."""
    vector = state[: form.dimensions].astype(np.float64)
    vector = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype("<f4")
    return base64.b64encode(vector.tobytes()).decode() if form.base64 else vector.tolist()
