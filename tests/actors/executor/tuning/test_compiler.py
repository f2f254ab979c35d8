"""Kernels of steps that will be timed are compiled ahead, for a GPU that is not here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.grids import needs_full
from tests.kernels.warm import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton on this platform")

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 5000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
PROGRAM = """
import sys
from pathlib import Path

import torch

from pagebus.actors.executor.tuning.changes import Measurable
from pagebus.actors.executor.tuning.compiler import StepCompiler, Wanted
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.shards.local import local_config
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.shapes import Product
from pagebus.kernels.linear.skinny_gemm import TileConfig
from tests.kernels.warm import run


def count():
    return len(list(Path(sys.argv[2]).rglob("_tiles_kernel.cubin")))


if __name__ == "__main__":
    world = int(sys.argv[3])
    qkv = Product("plain", 4096 // world, 1024)
    config = local_config(ModelConfig.load(Path(sys.argv[1])), 0, world)
    wanted = Wanted(config, torch.bfloat16, torch.bfloat16, "auto")
    with StepCompiler(wanted, Measurable([qkv], None, None), Target(90, 132)) as compiler:
        compiler.begin(8, [{qkv: TileConfig(24, 8, 128, 4, 4)}])
        compiler.begin(8, [])
        compiler.begin(8, [{qkv: TileConfig(26, 8, 128, 4, 4)}, {qkv: TileConfig(28, 8, 128, 4, 4)}])
        for _ in range(3):
            compiler.wait()
            print(count())
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [needs_full(1), 2])
def test_kernels_of_each_choice_are_compiled(world: int, tmp_path: Path) -> None:
    """With today's, once each, and in the order in which they were begun; of a rank too, whose others are not there."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program, cache = tmp_path / "program.py", tmp_path / "cache"
    program.write_text(PROGRAM)
    done = run([str(program), str(tmp_path), str(cache), str(world)], TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-3000:]
    first, same, last = map(int, done.stdout.split())
    assert first >= 2
    assert first == same
    assert last == same + 2
