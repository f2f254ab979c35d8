"""The architectures of GGUF files that are read, and their fields of ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.fields import every_nth
from pagebus.actors.model.gguf.metadata import Metadata
from pagebus.actors.model.gguf.names import FUSED, SANDWICH

Fields = dict[str, Any]
SOFTMAX = 1
WINDOW = "attention.sliding_window"


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """``architecture`` is the word of ``config.json``. ``fields`` reads what other architectures do not have, and
    ``names`` are its own names of tensors.

    ``pairs``: rows of queries and keys are ordered so that neighbours rotate together. ``whole_norms``: norms are
    stored with the 1 that is added to them. ``windows``: layers may have windows. ``part_turns``: some dimensions of
    heads may not rotate.
    """

    architecture: str
    fields: Callable[[Metadata], Fields] = lambda data: {}
    names: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = False
    whole_norms: bool = False
    windows: bool = False
    part_turns: bool = False


def _biases(data: Metadata) -> Fields:
    """Where tensors have biases."""
    there = data.file.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in there, "mlp_bias": "blk.0.ffn_down.bias" in there}


def _mixtral(data: Metadata) -> Fields:
    return {"num_local_experts": data.integer("expert_count"), "num_experts_per_tok": data.integer("expert_used_count")}


def _mistral(data: Metadata) -> Fields:
    return {"sliding_window": data.integer(WINDOW)}


def _experts(data: Metadata) -> Fields:
    if data.get("expert_gating_func", SOFTMAX) != SOFTMAX:
        raise data.wrong("expert_gating_func", "is not softmax, which is not supported for this architecture")
    return {
        "num_experts": data.integer("expert_count"),
        "num_experts_per_tok": data.integer("expert_used_count"),
        "moe_intermediate_size": data.integer("expert_feed_forward_length"),
    }


def _qwen2_moe(data: Metadata) -> Fields:
    shared = data.integer("expert_shared_feed_forward_length")
    return {
        **_experts(data),
        "norm_topk_prob": bool(data.get("expert_weights_norm")),
        "shared_expert_intermediate_size": shared,
    }


def _qwen3_moe(data: Metadata) -> Fields:
    return {**_experts(data), "norm_topk_prob": bool(data.get("expert_weights_norm", True))}


PATTERN = "attention.sliding_window_pattern"
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights. Only these divide scores by another number than the root of a head's
size."""


def _gemma(data: Metadata) -> Fields:
    """Gemma 2 and 3. Files do not say what scores are divided by."""
    heads, hidden = data.integer("attention.head_count"), data.integer("embedding_length")
    head_dim = data.integer("attention.key_length", 256)
    largest = data.integer("block_count") == LARGEST_GEMMA[data.architecture]
    fields: Fields = {
        "head_dim": head_dim, "query_pre_attn_scalar": hidden // heads if largest else head_dim,
        "sliding_window": data.integer(WINDOW),
    }  # fmt: skip
    for theirs, ours in (("attn_logit_softcapping", "attn"), ("final_logit_softcapping", "final")):
        fields[f"{ours}_logit_softcapping"] = data.number(theirs) if data.get(theirs) else None
    if data.architecture == "gemma3":
        fields["rope_local_base_freq"] = data.number("rope.freq_base_swa", 10000.0)
    return {**fields, **_window_layers(data)}


def _window_layers(data: Metadata) -> Fields:
    """Which layers have the window, where a file says it: all but every n-th, or a flag for each."""
    pattern = data.get(PATTERN)
    if isinstance(pattern, list):
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}
    if pattern is None and data.architecture == "gemma3":
        return {}
    return {"layer_types": list(every_nth(data.integer("block_count"), data.integer(PATTERN, 2)))}


def _phi3(data: Metadata) -> Fields:
    """Converters write a window of all tokens where there is none."""
    window, positions = data.get(WINDOW), data.integer("context_length")
    original = data.integer("rope.scaling.original_context_length", positions)
    return {
        "sliding_window": data.integer(WINDOW) if window and window != positions else None,
        "original_max_position_embeddings": original,
    }


def find_architecture(data: Metadata) -> GgufArchitecture:
    """Raises ModelError for one that is not read, by its name."""
    if data.architecture == "llama" and (data.get("expert_count") or data.get(WINDOW)):
        return MIXTRAL if data.get("expert_count") else MISTRAL
    found = ARCHITECTURES.get(data.architecture)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{data.file.path}: general.architecture {data.architecture!r} is not read (only {known})")
    return found


MISTRAL = GgufArchitecture("MistralForCausalLM", _mistral, pairs=True, windows=True)
MIXTRAL = GgufArchitecture("MixtralForCausalLM", _mixtral, pairs=True)
ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", _biases, pairs=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma": GgufArchitecture("GemmaForCausalLM", whole_norms=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _gemma, SANDWICH, whole_norms=True, windows=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _gemma, SANDWICH, whole_norms=True, windows=True),
    "phi3": GgufArchitecture("Phi3ForCausalLM", _phi3, FUSED, windows=True, part_turns=True),
}
"""By ``general.architecture``. `find_architecture` tells Mistral and Mixtral from Llama by other keys."""
