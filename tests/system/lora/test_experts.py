"""Adapters of experts: greedy tokens are PEFT's own, in float32, in both forms in which files have their matrices.

``PAGEBUS_TEST_ADAPTERS=full`` runs each family with 1, 8 and 64 adapters in a step.
"""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.lora.projections import all_projections
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from tests.helpers.lora.adapters import greedy, merged, source_of
from tests.helpers.lora.peft_models import generated_by_peft, save_with_peft
from tests.helpers.quantized.checkpoints import quantize
from tests.helpers.quantized.packers import PACKERS
from tests.system.harness import running
from tests.system.lora.test_peft import FULL
from tests.system.lora.test_tokens import TOKENS, Cases, ask, family, prompts

pytestmark = [
    pytest.mark.share(6),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),
]
"""PEFT uses patterns of parameters, and warns that it does not."""
TARGETS = ("q_proj", "o_proj", "gate_up_proj", "down_proj", "experts")
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = r".*(shared_expert\.(gate|up|down)_proj|mlp\.(up|down)_proj)"
FAMILIES = "mixtral", "qwen3-moe", "qwen2-moe", "gpt-oss"
CASES = [("mixtral", 4), ("qwen3-moe", 4), ("qwen2-moe", 4), ("gpt-oss", 4), ("gpt-oss-odd", 2)]
if FULL:
    CASES = list(product((*FAMILIES, "mixtral-odd", "gpt-oss-odd", "glm4-moe", "llama4"), (1, 8, 64)))


def fields(index: int, name: str) -> dict[str, Any]:
    """Of the adapter with this index: mixed ranks, scales and products, alone or with attention and dense parts."""
    patterns: list[dict[str, Any]] = [
        {"target_parameters": BOTH, "target_modules": []},
        {"target_parameters": BOTH[1:], "target_modules": ["q_proj"], "use_rslora": True},
        {"target_parameters": BOTH[:1], "target_modules": SHARED if name == "qwen2-moe" else ATTENTION},
        {
            "target_parameters": BOTH, "target_modules": ["o_proj"], "use_rslora": True,
            "rank_pattern": {r".*\.experts\.down_proj": 3, r"layers\.1\..*gate_up_proj": 7},
            "alpha_pattern": {"mlp.experts.gate_up_proj": 5},
        },
    ]  # fmt: skip
    parameters = patterns[index % 4]
    if name.startswith("llama4"):
        renamed = [each.replace("mlp.", "feed_forward.") for each in parameters["target_parameters"]]
        parameters |= {"target_parameters": renamed}
    return {"r": 1 + index % 9, "lora_alpha": 4 + index % 3, **parameters}


def make_cases(base: Path, tmp_path: Path, name: str, count: int) -> Cases:
    """The model alone, one adapter of attention, and ``count`` of experts, with prompts and what they give."""
    asked = prompts(2 if count < 64 else 1, 0)
    folders = [
        save_with_peft(base, tmp_path / f"adapter-{index}", seed=index, **fields(index, name)) for index in range(count)
    ]
    folders.append(save_with_peft(base, tmp_path / "attention", seed=99, r=4, target_modules=["q_proj", "o_proj"]))
    cases: Cases = [(None, asked, greedy(merged(base, None), asked, TOKENS))]
    for folder in folders:  # one by one: PEFT has no two adapters with different parameters in one model
        cases.append(
            (source_of(folder, base, targets=TARGETS), asked, *generated_by_peft(base, [folder], [asked], TOKENS))
        )
    answers = [str(told) for _, _, told in cases]
    assert len(set(answers)) == len(answers), "the adapters do not differ"
    return cases


def serving(base: Path, count: int, **options: object) -> Any:
    lora = {"enable_lora": True, "max_loras": count, "lora_target_modules": (*TARGETS, *ATTENTION)}
    return running(base, partial(MemoryBus, MemoryServer()), max_num_seqs=256, **lora | options)


@pytest.mark.parametrize(("name", "count"), CASES)
async def test_tokens_are_those_of_peft(name: str, count: int, tmp_path: Path) -> None:
    """The second time prompts are cached."""
    base = family(tmp_path, name)
    cases = make_cases(base, tmp_path, name, count)
    async with serving(base, count + 1) as system:
        await ask(system, cases)
        await ask(system, cases)


@pytest.mark.parametrize("name", ["llama4", "granite-moe"])
async def test_other_ways_to_store_experts(name: str, tmp_path: Path) -> None:
    """Inputs before outputs, weights before their experts; and other names."""
    base = family(tmp_path, name)
    asked, told = prompts(2, 0), fields(0, name)
    if name == "granite-moe":
        told |= {"target_parameters": [each.replace("mlp", "block_sparse_moe") for each in BOTH]}
    folder = save_with_peft(base, tmp_path / "adapter", seed=1, **told)
    answers = generated_by_peft(base, [folder], [asked], TOKENS)[0]
    assert answers != greedy(merged(base, None), asked, TOKENS)
    async with serving(base, 1) as system:
        await ask(system, [(source_of(folder, base, targets=TARGETS), asked, answers)])


async def test_beside_latents(tmp_path: Path) -> None:
    """Experts have to be named among the modules, so the others have to be as well: latent attention's, too."""
    base, latents = family(tmp_path, "deepseek-v3"), ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    asked, told = prompts(2, 0), {"target_parameters": BOTH, "target_modules": latents}
    folder = save_with_peft(base, tmp_path / "adapter", seed=1, r=4, **told)
    answers = generated_by_peft(base, [folder], [asked], TOKENS)[0]
    assert answers != greedy(merged(base, None), asked, TOKENS)
    targets = (*latents, "experts")
    async with serving(base, 1, lora_target_modules=targets) as system:
        await ask(system, [(source_of(folder, base, targets=targets), asked, answers)])


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
async def test_one_by_one(name: str, tmp_path: Path) -> None:
    """As PEFT saved them while each expert was a module of its own."""
    base = family(tmp_path, name)
    folder, asked = save_one_by_one(base, tmp_path / "adapter", name), prompts(3, 0)
    told = generated_by_peft(base, [folder], [asked], TOKENS)[0]
    assert told != greedy(merged(base, None), asked, TOKENS)
    async with serving(base, 1) as system:
        await ask(system, [(source_of(folder, base, targets=TARGETS), asked, told)])


def save_one_by_one(base: Path, folder: Path, name: str) -> Path:
    generator, tensors = torch.Generator().manual_seed(4), {}
    for projection in all_projections(ModelConfig.load(base)):
        prefix = projection.name.rpartition(".")[0]
        for number, (module, width) in product(
            range(projection.experts), zip(projection.modules, projection.widths, strict=True)
        ):
            part = module.rpartition(".")[2]
            whole = f"{prefix}.{number}.{part}"
            if name == "mixtral":
                part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
                whole = f"{prefix.replace('mlp', 'block_sparse_moe')}.{number}.{part}"
            for matrix, shape in (("A", (3, projection.inputs)), ("B", (width, 3))):
                values = torch.empty(shape).normal_(0, 0.3, generator=generator)
                tensors[f"base_model.model.{whole}.lora_{matrix}.weight"] = values
    parts = ["w1", "w2", "w3"] if name == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5, "target_modules": parts}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


async def test_preemption_and_few_places(tmp_path: Path) -> None:
    """Adapters come and go, and places hold none of the one before."""
    base = family(tmp_path, "qwen3-moe")
    cases = make_cases(base, tmp_path, "qwen3-moe", 4)
    tight = {"num_gpu_blocks_override": 24, "max_model_len": 96, "preemption_mode": "swap", "swap_space": 0.01}
    async with serving(base, 2, max_num_batched_tokens=24, **tight) as system:
        await ask(system, cases)
        await ask(system, cases)


@pytest.mark.parametrize(("name", "packer"), [("qwen3-moe", "fp8"), ("mixtral", "gptq-4-act-order")])
async def test_quantized_experts(name: str, packer: str, tmp_path: Path) -> None:
    """The oracle is PEFT's, of the model that the quantized weights mean."""
    quantized, dense = quantize(family(tmp_path, name), tmp_path, PACKERS[packer])
    cases = make_cases(dense, tmp_path, name, 2)
    async with serving(quantized, 3) as system:
        await ask(system, cases)


@pytest.mark.parametrize(("name", "ranks", "whole"), [
    ("qwen3-moe", 2, False), ("gpt-oss", 2, False), ("mixtral", 2, True), ("gpt-oss-odd", 4, True),
])  # fmt: skip
async def test_ranks(name: str, ranks: int, whole: bool, tmp_path: Path) -> None:
    """Each rank has a part of every expert's width, or some whole experts, and the same of adapters."""
    base = family(tmp_path, name)
    cases = make_cases(base, tmp_path, name, 4)
    options = {"tensor_parallel_size": ranks, "enable_expert_parallel": whole}
    async with serving(base, 5, **options) as system:
        await ask(system, cases)
