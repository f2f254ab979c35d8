"""GGUF files of tiny models, written by ggml's own library, and the models that they mean in safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from tests.helpers.quantized.checkpoints import tensors_of
from tests.helpers.quantized.k_quants import quantize

K_SCALES = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208, None)}
"""Where blocks have the float16 by which all else is multiplied, and that of the minima."""
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
                 "gemma3_text": "gemma3"}  # fmt: skip
TypeOf = Callable[[str], Type]
"""The type of a matrix by its name in a GGUF file."""


def uniform(kind: Type) -> TypeOf:
    """All matrices alike."""
    return lambda name: kind


def mixture(name: str) -> Type:
    """Every type somewhere, also different ones in one product, as larger mixtures have them."""
    for part, kind in (
        ("attn_q.", Type.Q4_K), ("attn_k.", Type.Q4_K), ("attn_v.", Type.Q6_K), ("attn_qkv.", Type.Q5_K),
        ("attn_output.", Type.Q5_K), ("ffn_gate", Type.Q4_0), ("ffn_up", Type.Q8_0), ("ffn_down", Type.Q5_1),
        ("token_embd.", Type.Q6_K), ("output.", Type.Q8_0),
    ):  # fmt: skip
        if part in name:
            return Type.Q5_K if part.startswith("attn_") and ".1." in name else kind
    return Type.F32


def pack(tensor: torch.Tensor, kind: Type, seed: int | None) -> tuple[np.ndarray, torch.Tensor]:
    """A matrix as a file has it, and what it means. K-quants, which the library cannot make, are random, or without a
    ``seed`` our own."""
    values = tensor.float().numpy()
    if kind not in K_SCALES:
        data = gguf.quants.quantize(values, kind)
    else:
        data = quantize(values, kind) if seed is None else _random_blocks(values.shape, kind, seed)
    return data, torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32)).view(tensor.shape)


def _random_blocks(shape: tuple[int, ...], kind: Type, seed: int) -> np.ndarray:
    """Blocks of random bytes, whose numbers are about as large as those of the tiny models."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    assert shape[-1] % numbers == 0, f"{kind.name} has blocks of {numbers}"
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // numbers, size), np.uint8)
    scale, low = K_SCALES[kind]
    large, most = {Type.Q4_K: (2e-3, 15), Type.Q5_K: (1e-3, 31), Type.Q6_K: (1e-4, 0)}[kind]
    blocks[:, scale : scale + 2] = _halves(rng, len(blocks), large)
    if low is not None:
        blocks[:, low : low + 2] = _halves(rng, len(blocks), large * most / 2)
    return blocks.reshape(*shape[:-1], shape[-1] // numbers * size)


def _halves(rng: np.random.Generator, count: int, large: float) -> np.ndarray:
    return rng.uniform(large / 2, large, count).astype(np.float16).view(np.uint8).reshape(count, 2)


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as files of llama's architecture have them: neighbours turn together."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def restored(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The reverse."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


class Model:
    """A model's folder, and what is written of it."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.kind = str(self.config["model_type"])
        self.name = ARCHITECTURES.get(self.kind, self.kind)
        self.tensors = _stacked(tensors_of(folder))
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.name)
        self.names = gguf.get_tensor_name_map(arch, int(self.config["num_hidden_layers"]))

    def heads(self, name: str) -> int:
        """Those whose rows are permuted, or 0."""
        if self.name != "llama":
            return 0
        parts = {"attn_q.": "num_attention_heads", "attn_k.": "num_key_value_heads"}
        return next((int(self.config[key]) for part, key in parts.items() if part in name), 0)

    def stored(self, name: str) -> str:
        """The name in the file."""
        found = self.names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def write_gguf(
    folder: Path, file: Path, type_of: TypeOf, metadata: Mapping[str, Any] = {}, *, dense: Path | None = None,
    random_blocks: bool = True,
) -> Path:  # fmt: skip
    """``file`` of the model in ``folder``; into ``dense`` goes what it means. ``metadata``: more keys. K-quants are
    ``random_blocks``: they have more cases than real ones."""
    model, meant = Model(folder), {}
    writer = gguf.GGUFWriter(file, model.name)
    _write_fields(writer, model)
    for key, value in metadata.items():
        _write_value(writer, key, value)
    for index, (name, tensor) in enumerate(model.tensors.items()):
        stored, heads = model.stored(name), model.heads(model.stored(name))
        rows = permuted(tensor, heads) if heads else tensor
        rows = rows + 1 if model.name.startswith("gemma") and "norm" in name else rows
        kind = type_of(stored) if rows.dim() > 1 and "gate_inp" not in stored else Type.F32
        data, back = pack(rows, kind, index if random_blocks else None)
        writer.add_tensor(stored, data, raw_dtype=kind)
        back = back - 1 if model.name.startswith("gemma") and "norm" in name else back
        meant[name] = restored(back, heads) if heads else back
    _write_angles(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if dense is not None:
        _write_dense(folder, dense, meant)
    return file


def write_keys(file: Path, architecture: str, metadata: Mapping[str, Any]) -> Path:
    """A file without tensors."""
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in metadata.items():
        _write_value(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def _write_dense(folder: Path, dense: Path, meant: Mapping[str, torch.Tensor]) -> None:
    dense.mkdir()
    (dense / "config.json").write_text((folder / "config.json").read_text())
    own = tensors_of(folder)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in meant.items():
        parts = [(name, tensor)] if name in own else _unstacked(name, tensor)
        found |= {each: part.contiguous() for each, part in parts}
    assert found.keys() == own.keys()
    save_file(found, dense / "model.safetensors")


EXPERT = ".experts."


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts of a layer in one tensor."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        before, part, after = name.partition(EXPERT)
        if part:
            index, _, rest = after.partition(".")
            experts.setdefault(f"{before}{EXPERT}{rest}", []).append((int(index), tensor))
        else:
            found[name] = tensor
    stacks = {name: torch.stack([each for _, each in sorted(parts, key=lambda part: part[0])])
              for name, parts in experts.items()}  # fmt: skip
    return found | stacks


def _unstacked(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    before, _, after = name.partition(EXPERT)
    return [(f"{before}{EXPERT}{index}.{after}", part) for index, part in enumerate(tensor)]


def _write_fields(writer: gguf.GGUFWriter, model: Model) -> None:
    config = model.config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window") and (model.kind in ("mistral", "phi3") or model.name.startswith("gemma")):
        writer.add_sliding_window(config["sliding_window"])
    _write_experts(writer, config)
    if model.name in ("gemma2", "gemma3"):
        _write_gemma(writer, config)


def _write_gemma(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _write_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    count = config.get("num_experts") or config.get("num_local_experts")
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _write_angles(writer: gguf.GGUFWriter, model: Model) -> None:
    """Tables where converters write them: of Llama 3's rule, and of longrope."""
    rope = model.config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(model.config))
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
    if "long_factor" in rope:
        original = model.config["original_max_position_embeddings"]
        growth = np.sqrt(1 + np.log(model.config["max_position_embeddings"] / original) / np.log(original))
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(float(growth))


def llama3_factors(config: Mapping[str, Any]) -> np.ndarray:
    """What transformers' rule divides frequencies by."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = transformers.LlamaConfig(**config)
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](known, "cpu")
    dims = torch.arange(0, known.head_dim, 2).float() / known.head_dim
    return (config["rope_parameters"]["rope_theta"] ** -dims / stretched).numpy()


def _write_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", str: "string", int: "uint32", float: "float32", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)
