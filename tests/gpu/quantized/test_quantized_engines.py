"""Engines with quantized weights on CUDA: every format as transformers computes it, graphs and ``--deterministic``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engine.engine_cases import BFLOAT16_SHAPE, MAX_TOKENS, SETTINGS, make_prompts
from tests.gpu.engine.test_families import answers
from tests.gpu.engine_checks import check_graphs, check_independence, scored
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, load_reference, make_golden, reference_generate
from tests.helpers.quantized.checkpoints import quantize
from tests.helpers.quantized.packers import PACKERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
FIELDS: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
ONLINE = ("fp8", "int8", "int4")


@pytest.mark.parametrize("name", PACKERS)
def test_greedy_tokens_equal_the_dequantized_model(name: str, tmp_path: Path) -> None:
    """Float32, in which weights are dequantized exactly: alone and 32 at once, with graphs and without."""
    quantized, dense = quantize(make_golden(tmp_path / "model", "qwen3", FIELDS), tmp_path, PACKERS[name])
    prompts = make_prompts(DEFAULTS["vocab_size"], 32, seed=7)
    expected = reference_generate(dense, prompts, MAX_TOKENS)
    driver = Driver(quantized, **SETTINGS)
    runner = driver.engine._loaded.runner
    assert runner.graphs is not None
    assert answers(driver, prompts, 2048) == expected
    runner.graphs = None
    assert answers(driver, prompts[:3], 64) == expected[:3]
    driver.close()


@pytest.mark.parametrize("name", PACKERS)
def test_bfloat16_logits_are_near_float32(name: str, tmp_path: Path) -> None:
    """Last logits of prompts of 1 to 200 tokens, each alone and all together: kernels for few tokens and for many."""
    model = make_golden(tmp_path / "model", "qwen3", {**FIELDS, **BFLOAT16_SHAPE}, std=0.02)
    quantized, dense = quantize(model, tmp_path, PACKERS[name])
    driver = Driver(quantized, **SETTINGS | {"dtype": "bfloat16", "enforce_eager": True})
    prompts = [[5], *(prompt for prompt in make_prompts(DEFAULTS["vocab_size"], 9, seed=3) if len(prompt) > 1)]
    reference = load_reference(dense)
    alone = [scored(driver, [prompt])[0] for prompt in prompts]
    together = [alone[0], *scored(driver, prompts[1:])]
    driver.close()
    for prompt, *found in zip(prompts, together, alone, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).logits[0, -1]
        for row in found:  # activations may be rounded to 8 bits
            assert float((torch.tensor(row) - wanted).norm() / wanted.norm()) < 0.06


@pytest.mark.parametrize("method", ONLINE)
def test_graphs_give_the_same_tokens(method: str, tmp_path: Path) -> None:
    """Made at load; replayed and launched one by one, in bfloat16 with the same launch shapes."""
    folder = make_golden(tmp_path, "qwen3", BFLOAT16_SHAPE)
    settings = {"dtype": "bfloat16", "deterministic": True, "quantization": method}
    driver = Driver(folder, **SETTINGS | settings)
    check_graphs(driver)
    driver.close()


@pytest.mark.parametrize("name", ["fp8", "awq", "gptq-4-act-order", "modelopt-nvfp4"])
def test_deterministic_requests_do_not_know_each_other(name: str, tmp_path: Path) -> None:
    """Tokens and every bit of their log probabilities, among others or alone, and after a preemption."""
    model = make_golden(tmp_path / "model", "qwen3", {**FIELDS, **BFLOAT16_SHAPE})
    folder, _ = quantize(model, tmp_path, PACKERS[name])
    driver = Driver(folder, **SETTINGS | {"dtype": "bfloat16", "deterministic": True, "max_num_seqs": 64})
    check_independence(driver)
    driver.close()
