"""``pagebus tune`` within the steps of a small dense model: what it writes is chosen, right, and no slower."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.commands.cli import main
from pagebus.actors.executor.tuning.fitted import fitted
from pagebus.actors.executor.tuning.step_timer import compared, replay_pairs
from pagebus.kernels.common.target import first_target
from pagebus.kernels.common.user_tables import read_user_tables
from pagebus.kernels.linear.dispatch import Source, choose_product
from pagebus.kernels.linear.shapes import Product
from pagebus.kernels.linear.tables import load_user_table
from pagebus.kernels.linear.tuning.timing import call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8192,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
ROWS = (1, 32)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    read_user_tables(None)


def test_tune_writes_what_makes_steps_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both numbers of tokens, by what it says itself."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes, target = tmp_path / "shapes", first_target()
    assert target is not None
    options = ["--minutes", "0.3", "--launch-shapes-dir", str(shapes), "--tokens", *map(str, ROWS)]
    assert main(["tune", str(tmp_path), *options]) == 0
    text = capsys.readouterr().out
    print(text)
    assert all(f"{rows:>4} tokens" in text for rows in ROWS)
    assert "choices are changed" in text or "none is changed" in text
    read_user_tables(shapes)
    for product, chosen in load_user_table(target, shapes).items():
        assert set(chosen) <= set(ROWS)
        for tokens, config in chosen.items():
            given = product.form, tokens, product.rows, product.inputs, torch.bfloat16, target
            assert choose_product(*given)[2:5:2] == (config, Source.USER)


@pytest.mark.parametrize("name", ["plain:7168x2048", "partial:5120x2048", "gated:13696x2048"])
@pytest.mark.parametrize("tokens", [1, 8, 32, 64])
def test_fitted_tiles_are_right(name: str, tokens: int) -> None:
    """Those that a GPU takes."""
    target, product = first_target(), Product.parse(name)
    assert target is not None
    x = torch.randn(tokens, product.inputs, device="cuda").bfloat16()
    weight = torch.randn(product.rows, product.inputs, device="cuda").bfloat16() / product.inputs**0.5
    expected = call(product, None, x, weight).float()
    for config in fitted(product, tokens, target):
        found = call(product, config, x, weight).float()
        found = found.sum(0) if found.dim() == 3 else found
        assert float((found - expected).norm() / expected.norm()) < 1e-2, config


def test_pairs_are_told_apart() -> None:
    """A graph of twice the work takes longer, whichever comes first."""
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    graphs = []
    for count in (4, 8):
        torch.mm(x, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                torch.mm(x, x)
        graphs.append(graph)
    assert not compared(*replay_pairs(graphs[0], graphs[1], 10)).faster
    assert compared(*replay_pairs(graphs[1], graphs[0], 10)).faster
