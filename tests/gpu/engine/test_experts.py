"""Models with experts on CUDA, at widths for which their kernels use tensor cores: graphs, pieces, ``--deterministic``.

Token for token against transformers is in ``test_families.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.step.step_kernels import expert_shape, moe_of
from pagebus.kernels.common.target import target_of
from pagebus.kernels.moe.choice import choose_experts
from pagebus.kernels.moe.launch.shapes import ExpertsKernel
from tests.gpu.engine.engine_cases import SETTINGS, make_prompts
from tests.gpu.engine_checks import check_graphs, check_independence, scored
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, load_reference, make_golden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
WIDE: dict[str, Any] = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**WIDE, "mlp_only_layers": [1]},
    "qwen2_moe": {**WIDE, "shared_expert_intermediate_size": 384},
}


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_is_near_float32_for_few_and_many_tokens(model_type: str, tmp_path: Path) -> None:
    """Last logits of prompts of 1 to 200 tokens, each alone and all together: every form of the experts' kernels."""
    folder = make_golden(tmp_path, model_type, MODELS[model_type], std=0.02)
    driver = Driver(folder, **SETTINGS | {"dtype": "bfloat16", "enforce_eager": True})
    prompts = [[5], *(prompt for prompt in make_prompts(DEFAULTS["vocab_size"], 24, seed=3) if len(prompt) > 1)]
    runner = driver.engine._loaded.runner
    moe = moe_of(runner.model.config.spec)
    assert moe is not None
    shape, target = expert_shape(moe, 512), target_of(runner.kv_cache.device)
    counts = (1, *map(len, prompts), sum(map(len, prompts)))
    kernels = {choose_experts(count, shape, torch.bfloat16, target).kernel for count in counts}
    assert kernels == {ExpertsKernel.PAIRS, ExpertsKernel.GROUPED, ExpertsKernel.SPECIALIZED}

    reference = load_reference(folder)
    for weight in reference.parameters():
        weight.data = weight.data.bfloat16().float()
    alone = [scored(driver, [prompt])[0] for prompt in prompts]
    errors: list[float] = []
    together = [alone[0], *scored(driver, prompts[1:])]
    driver.close()
    for prompt, *found in zip(prompts, together, alone, strict=True):
        with torch.inference_mode():
            wanted = reference(torch.tensor([prompt])).logits[0, -1]
        errors += [float((torch.tensor(row) - wanted).norm() / wanted.norm()) for row in found]
    assert sorted(errors)[len(errors) // 2] < 2e-2
    assert max(errors) < 0.2  # of two experts that are almost equal the other may be chosen


@pytest.mark.parametrize("model_type", MODELS)
def test_graphs_give_the_same_tokens(model_type: str, tmp_path: Path) -> None:
    """In bfloat16 and with sorted kernels everywhere, so that padding is all that differs: experts are chosen within
    the graph, anew in each replay."""
    folder = make_golden(tmp_path, model_type, MODELS[model_type])
    driver = Driver(folder, **SETTINGS | {"dtype": "bfloat16", "deterministic": True})
    check_graphs(driver)
    driver.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", MODELS)
def test_deterministic_requests_do_not_know_each_other(model_type: str, dtype: str, tmp_path: Path) -> None:
    """Tokens and every bit of their log probabilities, among others or alone, and after a preemption."""
    folder = make_golden(tmp_path, model_type, MODELS[model_type])
    driver = Driver(folder, **SETTINGS | {"dtype": dtype, "deterministic": True, "max_num_seqs": 64})
    check_independence(driver)
    driver.close()
