"""gpt-oss as it is published: experts in MXFP4 whose gate and up rows come by turns, with biases."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagebus.actors.model.families.registry import ARCHITECTURES
from pagebus.actors.model.quantization.parsing import parse_quantization
from tests.actors.executor.loading.formats.test_checkpoints import check
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.gpt_oss import quantize_experts


def small_gpt_oss(tmp_path: Path) -> tuple[Path, Path]:
    """A quantized model, and the same with dequantized experts."""
    fields = {
        "hidden_size": 96, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "sliding_window": 20,
        "num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    model = make_golden(tmp_path / "model", "gpt_oss", fields)
    return quantize_experts(model, tmp_path)


@pytest.mark.skipif("GptOssForCausalLM" not in ARCHITECTURES, reason="the family is not served")
def test_gpt_oss(tmp_path: Path) -> None:
    """Tokens of the model that transformers computes with the dequantized experts."""
    check(*small_gpt_oss(tmp_path))


def test_only_experts_are_quantized() -> None:
    """Whether or not the list of all else is complete."""
    found = parse_quantization({"quant_method": "mxfp4"}, {})
    assert found is not None
    assert found.scheme(["model.layers.0.self_attn.q_proj"]) is None
    assert str(found.scheme(["model.layers.0.mlp.experts.gate_up_proj"])) == "mxfp4, e2m1, groups of 32"
