"""Makes a model's configuration of a GGUF file, by way of the fields that ``config.json`` would have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagebus.actors.model.gguf.architectures import WINDOW, GgufArchitecture, find_architecture
from pagebus.actors.model.gguf.header import GgufFile, GgufTensor
from pagebus.actors.model.gguf.metadata import Metadata
from pagebus.actors.model.gguf.names import our_tensors
from pagebus.actors.model.gguf.tokens import end_token_ids
from pagebus.actors.model.gguf.types import BY_NAME
from pagebus.actors.model.quantization.quantization import Quantization
from pagebus.actors.model.spec import ModelSpec

UNKNOWN = (
    *("pooling_type", "logit_scale", "embedding_scale", "residual_scale", "attention.scale", "attention.output_scale"),
    *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale", "expert_group_count"),
    *("leading_dense_block_count", "interleave_moe_layer_step", "nextn_predict_layers", "attention.sinks"),
    *("attention.chunk_size", "attention.shared_kv_layers", "swin_norm", "rope.scaling.alpha"),
)
"""Keys of other architectures, which would change what is computed."""
YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
SIZES = (
    ("ffn_down", -1, "feed_forward_length"), ("ffn_down_exps", -1, "expert_feed_forward_length"),
    ("ffn_down_exps", 0, "expert_count"), ("ffn_down_shexp", -1, "expert_shared_feed_forward_length"),
)  # fmt: skip
"""Sizes of a layer's tensors that keys repeat: tensor, dimension, key."""


@dataclass(frozen=True, slots=True)
class Described:
    """A model by its file: the ``fields`` of ``config.json``, those of ``generation_config.json`` (``generation``), how
    each weight is stored, and the architecture."""

    fields: Mapping[str, Any]
    generation: Mapping[str, Any]
    quantization: Quantization | None
    known: GgufArchitecture

    def as_stored(self, spec: ModelSpec) -> ModelSpec:
        """``spec`` with rows and norms in the file's order and form."""
        if self.known.pairs:
            spec = replace(spec, rope=tuple(replace(rope, layout="pairs") for rope in spec.rope))
        if self.known.whole_norms:
            spec = replace(spec, norm=replace(spec.norm, offset=0, wide=True))
        return spec


def describe(file: GgufFile) -> Described:
    """The model in ``file``.

    Raises:
        ModelError: an architecture that is not read, or keys and tensors that do not fit together.
    """
    data = Metadata(file)
    known = find_architecture(data)
    fields = _fields(data, known)
    generation = {"eos_token_id": end_token_ids(file, fields["vocab_size"])}
    return Described(fields, generation, quantization_of(our_tensors(file, known.names)), known)


def quantization_of(tensors: Mapping[str, GgufTensor]) -> Quantization | None:
    """Each weight as it is stored; None where none is quantized."""
    schemes = {name.rpartition(".")[0]: BY_NAME[tensor.type].scheme for name, tensor in tensors.items()}
    return Quantization("gguf", None, exact=schemes) if any(schemes.values()) else None


def _fields(data: Metadata, known: GgufArchitecture) -> dict[str, Any]:
    """The fields of ``config.json``."""
    vocabulary, hidden = _embedding(data)
    heads, layers = data.integer("attention.head_count"), data.integer("block_count")
    head_dim = data.integer("attention.key_length", max(1, hidden // heads))
    if data.integer("attention.value_length", head_dim) != head_dim:
        raise data.wrong("attention.value_length", f"is not attention.key_length, {head_dim}, which is not supported")
    for key in UNKNOWN if known.windows else (WINDOW, *UNKNOWN):
        data.refuse(key)
    _check_sizes(data, heads * head_dim, layers)
    tensors = data.file.tensors
    return {
        "architectures": [known.architecture], "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": data.integer("feed_forward_length"), "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": data.integer("attention.head_count_kv", heads),
        "head_dim": head_dim, "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": data.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32" if {each.type for each in tensors.values()} == {"F32"} else "bfloat16",
        **_rope(data, known, head_dim), **known.fields(data),
    }  # fmt: skip


def _embedding(data: Metadata) -> tuple[int, int]:
    """Tokens of the vocabulary, and the hidden size."""
    shape, hidden = data.shape("token_embd.weight"), data.integer("embedding_length")
    if len(shape) != 2 or shape[1] != hidden:
        raise data.wrong("embedding_length", f"is {hidden}, but tensor token_embd.weight has shape {list(shape)}")
    return shape[0], hidden


def _check_sizes(data: Metadata, width: int, layers: int) -> None:
    """Compare keys with the tensors of the first layer: nothing is allocated by numbers that these do not have."""
    shape = data.shape("blk.0.attn_output.weight")
    if shape[-1] != width:
        raise data.wrong("attention.head_count", f"asks for {width} columns, but tensor blk.0.attn_output.weight has "
                         f"shape {list(shape)}")  # fmt: skip
    found = {name.split(".")[1] for name in data.file.tensors if name.startswith("blk.")}
    if found != {str(index) for index in range(min(layers, len(found) + 1))}:
        raise data.wrong("block_count", f"is {layers}, but the file has tensors of {len(found)} layers")
    for name, place, key in SIZES:
        tensor = data.file.tensors.get(f"blk.0.{name}.weight")
        if tensor is not None and data.get(key) is not None and tensor.shape[place] != data.integer(key):
            raise data.wrong(key, f"is {data.get(key)}, but tensor {tensor.name} has shape {list(tensor.shape)}")


def _rope(data: Metadata, known: GgufArchitecture, head_dim: int) -> dict[str, Any]:
    """Fields of the rotary embeddings. Files do not have Llama 3's rule, but a table of its divisors of frequencies."""
    dims = data.integer("rope.dimension_count", head_dim)
    if dims != head_dim and not known.part_turns:
        raise data.wrong("rope.dimension_count", f"is {dims}, but heads have {head_dim} dimensions")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": data.number("rope.freq_base", 10000.0)}
    if known.part_turns:
        rope["partial_rotary_factor"] = dims / head_dim
    rope |= _stretching(data, dims // 2)
    if data.architecture == "gemma3":  # layers with windows have another base
        local = {"rope_type": "default", "rope_theta": data.number("rope.freq_base_swa", 10000.0)}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {"rope_parameters": rope}


def _stretching(data: Metadata, pairs: int) -> dict[str, Any]:
    one = data.table("rope_freqs.weight", pairs)
    short, long = (data.table(f"rope_factors_{kind}.weight", pairs) for kind in ("short", "long"))
    if one is not None:
        return {"rope_type": "longrope", "short_factor": one, "long_factor": one, "attention_factor": 1.0}
    if short is not None and long is not None:
        factor = data.number("rope.scaling.attn_factor", 1.0)
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": factor}
    kind = data.get("rope.scaling.type", "none")
    if kind == "none" and data.get("rope.scale_linear") is None:
        return {}
    if kind == "yarn":
        original = data.integer("rope.scaling.original_context_length")
        for key in ("attn_factor", "yarn_attn_factor", "yarn_log_multiplier"):
            data.refuse(f"rope.scaling.{key}")
        betas = {key: data.number(f"rope.scaling.yarn_{key}", value) for key, value in YARN_BETAS.items()}
        factor = data.number("rope.scaling.factor")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    if kind in ("none", "linear"):
        factor = data.number("rope.scaling.factor" if kind == "linear" else "rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    raise data.wrong("rope.scaling.type", f"is {kind!r}, which is not supported (only linear, yarn and tables)")
