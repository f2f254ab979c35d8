"""``pagebus tune`` on a small model with experts: it ends in time, and what it writes is chosen, and right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.commands.cli import main
from pagebus.kernels.common.target import first_target
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.shapes import BUCKETS
from pagebus.kernels.moe.choice import candidates_for, decide
from pagebus.kernels.moe.experts import moe_experts, moe_experts_reference
from pagebus.kernels.moe.launch.shapes import Config, Shape
from pagebus.kernels.moe.launch.tables import load_user_table
from pagebus.kernels.moe.timing import random_layer, random_tokens
from pagebus.kernels.moe.tune import BEST, order
from pagebus.kernels.moe.weights import ExpertWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPE, ODD = Shape(32, 4, 1024, 512), Shape(32, 4, 1440, 360)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": SHAPE.hidden,
    "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "num_experts": SHAPE.experts, "num_experts_per_tok": SHAPE.top_k, "moe_intermediate_size": SHAPE.width,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16",
}  # fmt: skip
MINUTES = 1.0
"""Of the whole command, which begins nothing later."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    read_user_tables(None)


def test_tune_writes_what_is_chosen_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of more tokens than steps have, the first bucket at least; chosen launch shapes compute the layer of experts."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes, target = tmp_path / "shapes", first_target()
    assert target is not None
    assert main(["tune", str(tmp_path), "--minutes", str(MINUTES), "--launch-shapes-dir", str(shapes)]) == 0
    text = capsys.readouterr().out
    print(text)
    assert f"experts {SHAPE.name}" in text
    assert "choices are changed" in text or "none is changed" in text
    written = load_user_table(target, shapes)[SHAPE]
    assert user_path(target, shapes, Tuned.EXPERTS).is_file()
    assert next(bucket for bucket in order(SHAPE) if bucket > BUCKETS[-1]) in written
    read_user_tables(shapes)
    layer = random_layer(SHAPE)
    for bucket, config in written.items():
        assert decide(bucket, SHAPE, torch.bfloat16, target)[:2] == (config, Source.USER)
        assert error(bucket, SHAPE, layer, config) < 1e-2


@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=["whole", "odd"])
def test_what_is_timed_is_right(shape: Shape) -> None:
    """The cost model's best few of few tokens, a decode and a prompt."""
    target = first_target()
    assert target is not None
    layer = random_layer(shape)
    for num_tokens in (3, 100, 2048):
        for _, config in candidates_for(num_tokens, shape, target, BEST):
            assert error(num_tokens, shape, layer, config) < 1e-2, config


def error(num_tokens: int, shape: Shape, layer: ExpertWeights, config: Config) -> float:
    """Of at most 300 tokens, relative to the norm of what the reference gives."""
    tokens = random_tokens(min(300, num_tokens), shape)
    found = moe_experts(*tokens, layer, config).float()
    wanted = moe_experts_reference(*tokens, layer).float()
    return float((found - wanted).norm() / wanted.norm())
