"""Engines with quantized weights on CUDA: every format as transformers computes it, graphs and ``--deterministic``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.kernels.coded.rounding import round_tokens_reference
from tests.gpu.engine.engine_cases import BFLOAT16_SHAPE, MAX_TOKENS, SETTINGS, make_prompts
from tests.gpu.engine.test_families import answers
from tests.gpu.engine_checks import check_graphs, check_independence, scored
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, load_reference, make_golden, reference_generate
from tests.helpers.quantized.checkpoints import quantize
from tests.helpers.quantized.gpt_oss import quantize_experts
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
ROUNDED = {
    "fp8": torch.float8_e4m3fn, "fp8-static": torch.float8_e4m3fn, "fbgemm": torch.float8_e4m3fn,
    "modelopt-fp8": torch.float8_e4m3fn, "ct-int8": torch.int8,
}  # fmt: skip
"""Formats whose activations may be rounded, and to what."""
EXPERTS = ("gpt-oss", "fp8-blocks", "ct-int4-zeros", "awq", "ct-nvfp4", "bnb-nf4")
MOE: dict[str, Any] = {
    **FIELDS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "hidden_size": 192, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 20, "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


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
    """Last logits of prompts of 1 to 200 tokens, each alone and all together: kernels for few tokens and for many.

    Where activations may be rounded to 8 bits, errors are compared with those of transformers that rounds them. Its
    numbers cannot be expected: what differs in the last bit is rounded to others, and after some layers nothing of the
    errors is common. They are as large, though."""
    model = make_golden(tmp_path / "model", "qwen3", {**FIELDS, **BFLOAT16_SHAPE}, std=0.02)
    quantized, dense = quantize(model, tmp_path, PACKERS[name])
    driver = Driver(quantized, **SETTINGS | {"dtype": "bfloat16", "enforce_eager": True})
    prompts = [[5], *(prompt for prompt in make_prompts(DEFAULTS["vocab_size"], 9, seed=3) if len(prompt) > 1)]
    reference, rounding = load_reference(dense), load_reference(dense)
    if name in ROUNDED:
        round_inputs(rounding, ROUNDED[name])
    alone = [scored(driver, [prompt])[0] for prompt in prompts]
    together = [alone[0], *scored(driver, prompts[1:])]
    driver.close()
    for prompt, *found in zip(prompts, together, alone, strict=True):
        wanted, rounded = last_logits(reference, prompt), last_logits(rounding, prompt)
        limit = max(0.03, 1.5 * relative_error(rounded, wanted))
        for row in found:
            assert relative_error(torch.tensor(row), wanted) < limit


def round_inputs(reference: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let quantized modules round their activations, each token's with a scale of its own."""

    def rounded(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        values, scale = round_tokens_reference(inputs[0][0], dtype)
        return ((values.float() * scale).unsqueeze(0),)

    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(rounded)


def last_logits(reference: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([prompt])).logits[0, -1]
    return logits


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def experts_checkpoint(name: str, tmp_path: Path, changes: dict[str, Any], **options: float) -> tuple[Path, Path]:
    """A mixture with quantized experts, and the model that it means."""
    if name == "gpt-oss":
        return quantize_experts(make_golden(tmp_path / "model", "gpt_oss", {**GPT_OSS, **changes}, **options), tmp_path)
    return quantize(
        make_golden(tmp_path / "model", "qwen3_moe", {**MOE, **changes}, **options), tmp_path, PACKERS[name]
    )


@pytest.mark.parametrize("name", EXPERTS)
def test_greedy_tokens_with_quantized_experts(name: str, tmp_path: Path) -> None:
    """Float32, in which a layer is dequantized at a time: the tokens of transformers with the dequantized weights."""
    quantized, dense = experts_checkpoint(name, tmp_path, {})
    prompts = make_prompts(DEFAULTS["vocab_size"], 16, seed=7)
    driver = Driver(quantized, **SETTINGS)
    assert answers(driver, prompts, 2048) == reference_generate(dense, prompts, MAX_TOKENS)
    driver.close()


@pytest.mark.parametrize("name", EXPERTS)
def test_bfloat16_with_quantized_experts(name: str, tmp_path: Path) -> None:
    """Last logits of prompts of 1 to 200 tokens, alone and all together, are near those of transformers in float32; a
    replayed graph gives the tokens of kernels that are launched one by one."""
    quantized, dense = experts_checkpoint(name, tmp_path, {"hidden_size": 512}, std=0.02)
    driver = Driver(quantized, **SETTINGS | {"dtype": "bfloat16", "deterministic": True})
    assert driver.engine.kernels["experts"] == "moe_coded"
    check_graphs(driver)
    driver.close()

    prompts = [[5], *(prompt for prompt in make_prompts(DEFAULTS["vocab_size"], 9, seed=3) if len(prompt) > 1)]
    driver = Driver(quantized, **SETTINGS | {"dtype": "bfloat16", "enforce_eager": True})
    reference = load_reference(dense)
    alone = [scored(driver, [prompt])[0] for prompt in prompts]
    together = [alone[0], *scored(driver, prompts[1:])]
    driver.close()
    errors = []
    for prompt, *found in zip(prompts, together, alone, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).logits[0, -1]
        errors += [float((torch.tensor(row) - wanted).norm() / wanted.norm()) for row in found]
    assert sorted(errors)[len(errors) // 2] < 0.06, errors  # a router's tie may send a token elsewhere in 16 bits


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
