"""The operations a device has: Triton kernels on CUDA, the torch references that define them on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernels import (
    bad_words,
    batch_inputs,
    copy_blocks,
    embedding,
    linear,
    logit_rules,
    logprobs,
    norm,
    paged_attention,
    penalties,
    rotary_attention,
    rotary_kv_write,
    sampling,
    scatter_words,
    token_masks,
)

Op = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Ops:
    """What the engine and the models call. Signatures and meaning are those of the functions in :mod:`kernels`."""

    embedding: Op
    rms_norm: Op
    add_rms_norm: Op
    rotary_kv_write: Op
    linear: Op
    gated_linear: Op
    partial_linear: Op
    cut_prompts: Op
    plan_attention: Op
    paged_attention: Op
    rotary_attention: Op
    scatter_words: Op
    prepare_inputs: Op
    store_sampled: Op
    sample: Op
    apply_logit_rules: Op
    apply_penalties: Op
    apply_token_masks: Op
    apply_bad_words: Op
    token_logprobs: Op
    copy_blocks: Op

    @classmethod
    def for_device(cls, device: torch.device) -> Ops:
        """Torch on a CPU, Triton kernels elsewhere."""
        return cls.reference() if device.type == "cpu" else cls.triton()

    @classmethod
    def triton(cls) -> Ops:
        """The kernels (on a CPU they need Triton's interpreter)."""
        return cls._named("")

    @classmethod
    def reference(cls) -> Ops:
        """Plain torch, on any device."""
        return cls._named("_reference")

    @classmethod
    def invariant(cls) -> Ops:
        """The kernels, and where a row's result depends on the other rows, slower ones with which it does not."""
        return cls._named("_invariant")

    @classmethod
    def _named(cls, suffix: str) -> Ops:
        return cls(**{field.name: _find(field.name, suffix) for field in fields(cls)})


_MODULES = {
    "embedding": embedding,
    "rms_norm": norm,
    "add_rms_norm": norm,
    "rotary_kv_write": rotary_kv_write,
    "linear": linear,
    "gated_linear": linear,
    "partial_linear": linear,
    "cut_prompts": paged_attention,
    "plan_attention": paged_attention,
    "paged_attention": paged_attention,
    "rotary_attention": rotary_attention,
    "scatter_words": scatter_words,
    "prepare_inputs": batch_inputs,
    "store_sampled": batch_inputs,
    "sample": sampling,
    "apply_logit_rules": logit_rules,
    "apply_penalties": penalties,
    "apply_token_masks": token_masks,
    "apply_bad_words": bad_words,
    "token_logprobs": logprobs,
    "copy_blocks": copy_blocks,
}


def _find(name: str, suffix: str) -> Op:
    """``rms_norm`` and ``_reference`` name ``kernels.norm.rms_norm_reference``.

    Operations without an ``_invariant`` form never looked at other rows.
    """
    full = name + suffix
    if suffix == "_invariant" and not hasattr(_MODULES[name], full):
        full = name
    op: Op = getattr(_MODULES[name], full)
    return op
