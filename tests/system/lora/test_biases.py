"""Adapters with biases (`lora_bias`): greedy tokens are PEFT's own, in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.lora.adapters import greedy, merged, source_of
from tests.helpers.lora.peft_models import generated_by_peft
from tests.helpers.model_factory import load_reference
from tests.system.harness import running
from tests.system.lora.test_tokens import TOKENS, Cases, ask, family, prompts

WARNINGS = "UserWarning", "RuntimeWarning"
pytestmark = [pytest.mark.share(6), *(pytest.mark.filterwarnings(f"ignore::{kind}") for kind in WARNINGS)]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "qkv_proj", "lm_head", "bias")
FIELDS: dict[str, list[dict[str, Any]]] = {
    "split": [
        {"target_modules": ["q_proj", "k_proj", "o_proj"], "r": 16, "lora_bias": True},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "r": 3, "lora_bias": True, "use_rslora": True},
        {"target_modules": ["v_proj", "lm_head"], "r": 5, "lora_bias": True, "rank_pattern": {"v_proj": 8}},
        {"target_modules": "all-linear", "r": 4},
    ],
    "fused": [
        {"target_modules": ["qkv_proj", "o_proj"], "r": 16, "lora_bias": True},
        {"target_modules": ["gate_up_proj", "down_proj"], "r": 2, "lora_bias": True},
    ],
}  # fmt: skip


def save(base: Path, folder: Path, seed: int, **fields: Any) -> Path:
    import peft

    generator = torch.Generator().manual_seed(seed)
    model = peft.get_peft_model(load_reference(base), peft.LoraConfig(task_type="CAUSAL_LM", lora_alpha=6, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0, 0.3, generator=generator)
    model.save_pretrained(str(folder))
    return folder


@pytest.mark.parametrize(("name", "ranks"), [("qwen2", 1), ("phi3", 1), ("llama3", 2), ("qwen2", 2)])
async def test_tokens_are_those_of_peft(name: str, ranks: int, tmp_path: Path) -> None:
    """With the largest rank there is; beside adapters without biases and the model alone."""
    base, asked = family(tmp_path, name), prompts(2, 0)
    cases: Cases = [(None, asked, greedy(merged(base, None), asked, TOKENS))]
    for index, fields in enumerate(FIELDS["fused" if name == "phi3" else "split"]):
        folder = save(base, tmp_path / f"adapter-{index}", index, **fields)
        (told,) = generated_by_peft(base, [folder], [asked], TOKENS)
        cases.append((source_of(folder, base, targets=TARGETS), asked, told))
    assert len({str(told) for *_, told in cases}) == len(cases), "the adapters do not differ"
    options = {"enable_lora": True, "max_loras": 4, "lora_target_modules": TARGETS, "tensor_parallel_size": ranks}
    async with running(base, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)
        await ask(system, cases)
