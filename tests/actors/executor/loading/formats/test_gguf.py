"""GGUF files of all families and types that are read, token for token against transformers with what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from pagebus.actors.executor.layers.quantized.weights import empty_layout
from pagebus.actors.executor.loading.formats.gguf import READERS
from pagebus.actors.executor.loading.formats.storing import store
from pagebus.actors.model.gguf.types import BY_NAME
from pagebus.actors.model.quantization.scheme import Scheme, mixed
from pagebus.kernels.quantized.layouts import W4Words, W8Blocks, W8Rows
from tests.actors.executor.loading.formats.test_checkpoints import check
from tests.helpers.model_factory import LLAMA3_ROPE, make_golden
from tests.helpers.quantized.checkpoints import noise
from tests.helpers.quantized.gguf_files import mixture, pack, uniform, write_gguf

pytestmark = pytest.mark.share(6)

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1 + 0.01 * pair for pair in range(24)],
        "long_factor": [1 + 0.5 * pair for pair in range(24)]}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
TIED = {"tie_word_embeddings": True}
"""As all models of these architectures are there."""
LOCAL = {**TIED, "num_hidden_layers": 3, "sliding_window": 20, "query_pre_attn_scalar": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"rope_parameters": YARN}),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 512, "norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "gemma": ("gemma", TIED),
    "gemma2": ("gemma2", {**LOCAL, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 12.0}),
    "gemma3": ("gemma3_text", {**LOCAL, "sliding_window_pattern": 2, "rope_parameters": ROPES}),
    "phi3": ("phi3", {"sliding_window": 21, "partial_rotary_factor": 0.75}),
    "phi3-long": ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": LONG | {"partial_rotary_factor": 0.75},
                           "original_max_position_embeddings": 300, "max_position_embeddings": 1200}),
}  # fmt: skip
TYPES = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K)


def scheme_of(kind: Type) -> Scheme:
    scheme = BY_NAME[kind.name].scheme
    assert scheme is not None
    return scheme


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_the_dequantized_model(name: str, tmp_path: Path) -> None:
    """A mixture of types, with different ones in one product."""
    kind, fields = FAMILIES[name]
    model = make_golden(tmp_path / "model", kind, SIZES | fields)
    check(write_gguf(model, tmp_path / "model.gguf", mixture, dense=tmp_path / "dense"), tmp_path / "dense")


@pytest.mark.parametrize("kind", [*TYPES, Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_each_type_alone(kind: Type, tmp_path: Path) -> None:
    """Also of embeddings and head."""
    model = make_golden(tmp_path / "model", "qwen3", SIZES)
    check(write_gguf(model, tmp_path / "model.gguf", uniform(kind), dense=tmp_path / "dense"), tmp_path / "dense")


def test_a_product_of_dense_and_quantized_parts(tmp_path: Path) -> None:
    """It is dense."""
    model = make_golden(tmp_path / "model", "llama", SIZES)

    def type_of(name: str) -> Type:
        return Type.F16 if "attn_k." in name else Type.Q4_K if "attn" in name else Type.Q8_0

    check(write_gguf(model, tmp_path / "model.gguf", type_of, dense=tmp_path / "dense"), tmp_path / "dense")


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_library(kind: Type) -> None:
    """In the type's own layout, and in that of a product with a part of narrower groups."""
    data, expected = pack(noise(24, 512), kind, 3)
    own = scheme_of(kind)
    for scheme in (own, mixed([own, scheme_of(Type.Q6_K), scheme_of(Type.Q4_K)])):
        layout = empty_layout(scheme, [24], 512, torch.device("cpu"))
        store(layout, READERS[own.packing].read({"weight": torch.from_numpy(data)}, own, 24, 512), own)
        torch.testing.assert_close(layout.dense(), expected, rtol=1e-6, atol=3e-7)


def test_layouts() -> None:
    """4 bits stay 4 bits; others become bytes, whose groups are those of the file."""
    found = {}
    for kind in TYPES:
        layout = empty_layout(scheme_of(kind), [64], 512, torch.device("cpu"))
        assert not isinstance(layout, W8Rows)
        width = layout.group if isinstance(layout, W4Words) else layout.block[1]
        found[kind.name] = (type(layout), width, layout.low is not None)
    assert found == {
        "Q4_0": (W4Words, 32, False), "Q4_1": (W4Words, 32, True), "Q4_K": (W4Words, 32, True),
        "Q5_0": (W8Blocks, 32, False), "Q5_1": (W8Blocks, 32, True), "Q5_K": (W8Blocks, 32, True),
        "Q8_0": (W8Blocks, 32, False), "Q6_K": (W8Blocks, 16, False),
    }  # fmt: skip


def test_the_library_and_we_know_the_same_sizes() -> None:
    """Of blocks."""
    for name, known in BY_NAME.items():
        assert gguf.GGML_QUANT_SIZES[Type[name]] == (known.numbers, known.size)


@pytest.mark.parametrize(("kind", "error"), [(Type.Q4_K, 0.08), (Type.Q5_K, 0.04), (Type.Q6_K, 0.02)])
def test_our_k_quants_are_what_the_library_reads(kind: Type, error: float) -> None:
    """Which is what measurements of quality need."""
    weight = noise(16, 512)
    _, meant = pack(weight, kind, None)
    assert error / 4 < float((meant - weight).norm() / weight.norm()) < error
