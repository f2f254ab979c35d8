"""Greedy tokens are PEFT's own, in float32: adapters that PEFT saved, and its own forward pass as the oracle.

``PAGEBUS_TEST_ADAPTERS=full`` runs each family with 1, 8 and 64 adapters in a step, with room and without.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.executor.layers.adapted.slots import AdapterSlots
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import Int32Array
from tests.helpers.lora.adapters import greedy, merged, source_of
from tests.helpers.lora.peft_models import generated_by_peft, save_with_peft
from tests.system.harness import running
from tests.system.lora.test_tokens import TOKENS, Cases, ask, family, prompts

pytestmark = pytest.mark.share(6)

FULL = os.environ.get("PAGEBUS_TEST_ADAPTERS") == "full"
SPLIT = ["q_proj", "v_proj"], ["o_proj", "gate_proj", "down_proj"], "all-linear", ["k_proj", "up_proj", "o_proj"]
FUSED = ["qkv_proj"], ["o_proj", "down_proj"], "all-linear", ["gate_up_proj", "o_proj"]
ATTENTION = ["q_proj", "v_proj"], ["o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], ["k_proj", "o_proj"]
LATENT = "kv_a_proj_with_mqa"
LATENTS = ["q_proj", LATENT], ["o_proj"], ["q_proj", LATENT, "o_proj"], [LATENT, "o_proj"]
LATENT_QUERIES = ["q_a_proj", LATENT], ["q_b_proj", "o_proj"], ["q_a_proj", "q_b_proj", LATENT], ["q_b_proj", "o_proj"]
TARGETS = {
    "phi3": FUSED, "phi3-partial": FUSED, "qwen3-moe": ATTENTION, "deepseek-v2-lite": LATENTS,
    "deepseek-v2": LATENT_QUERIES, "deepseek-v3": LATENT_QUERIES,
}  # fmt: skip
CASES = [
    ("llama3", 33, True), ("qwen3", 8, False), ("phi3", 8, False), ("qwen3-moe", 1, True),
    ("deepseek-v2-lite", 8, False), ("deepseek-v3", 4, True),
]  # fmt: skip
FEW_BLOCKS = {"qwen3-moe": 11, "deepseek-v2": 30, "deepseek-v2-lite": 30, "deepseek-v3": 30}
"""Room for the largest adapter and a few sequences."""
if FULL:
    CASES = list(product(("llama3", "qwen3", "phi3", "qwen3-moe", *list(TARGETS)[-3:]), (1, 8, 64), (True, False)))


def fields(name: str, index: int) -> dict[str, Any]:
    """Of the adapter with this index: mixed ranks, scales, modules and layers."""
    targets = TARGETS.get(name, SPLIT)[index % 4]
    patterns: list[dict[str, Any]] = [
        {"rank_pattern": {r"layers\.1\..*": 5}}, {"alpha_pattern": {"o_proj": 20}, "use_rslora": True},
        {"rank_pattern": {r"self_attn\..*": 3}, "alpha_pattern": {r"layers\.0\..*": 3.5}},
        {"use_rslora": True, "layers_to_transform": [0], "rank_pattern": {"o_proj": 7}},
    ]  # fmt: skip
    return {"target_modules": targets, "r": 1 + index % 16, "lora_alpha": 8 + index % 3, **patterns[index % 4]}


def make_cases(base: Path, tmp_path: Path, name: str, count: int) -> Cases:
    """The model alone, and ``count`` adapters that answer the same prompts."""
    asked = prompts(2 if count < 32 else 1, 0)
    folders = [
        save_with_peft(base, tmp_path / f"adapter-{index}", seed=index, **fields(name, index)) for index in range(count)
    ]
    answers = generated_by_peft(base, folders, [asked] * count, TOKENS)
    adapted = [(source_of(folder, base), asked, told) for folder, told in zip(folders, answers, strict=True)]
    return [(None, asked, greedy(merged(base, None), asked, TOKENS)), *adapted]


@pytest.mark.parametrize(("name", "count", "roomy"), CASES)
async def test_tokens_are_those_of_peft(
    name: str, count: int, roomy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: first each adapter comes while others are used; then all are there, and prompts are cached. Without room
    sequences are preempted and swapped, and adapters lose their blocks to others."""
    most_in_a_step, send = 0, AdapterSlots.send

    def counted(self: AdapterSlots, slots: Int32Array) -> bool:
        nonlocal most_in_a_step
        most_in_a_step = max(most_in_a_step, len(set(self.of_slot[slots].tolist()) - {-1}))
        return send(self, slots)

    monkeypatch.setattr(AdapterSlots, "send", counted)
    base = family(tmp_path, name)
    cases = make_cases(base, tmp_path, name, count)
    answers = [str(told) for _, _, told in cases]
    assert len(set(answers)) == len(answers), "the adapters do not differ"
    options: dict[str, object] = {"enable_lora": True, "max_loras": count, "max_num_seqs": 256}
    if not roomy:
        tight = {
            "num_gpu_blocks_override": FEW_BLOCKS.get(name, 20),
            "max_model_len": 96,
            "preemption_mode": "swap",
            "swap_space": 0.01,
        }
        options |= {"max_num_batched_tokens": 24, **tight}
    async with running(base, partial(MemoryBus, MemoryServer()), **options) as system:
        await ask(system, cases)
        await ask(system, cases)
        (replica,) = system.scheduler.core.replicas.values()
        assert most_in_a_step == count if roomy else replica.counts.num_swaps > 0
