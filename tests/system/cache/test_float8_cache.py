"""A cache of one byte per number, served: the tokens are those of transformers over keys and values rounded alike."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.loading.kv_scales import calculate_scales
from pagebus.actors.executor.loading.weights import load_weights
from pagebus.actors.executor.models import build_model
from pagebus.actors.model.config import ModelConfig
from pagebus.kernels.common.int8 import from_int8_reference, to_int8_reference
from tests.helpers.model_factory import (
    REFERENCE_CONFIGS,
    ReferenceConfig,
    load_reference,
    make_reference,
    reference_generate,
)
from tests.helpers.waiting import eventually
from tests.system.answers.test_beam_search import CONDITIONS, SEARCHES, preempted
from tests.system.answers.test_beam_search import prompts_for as beam_prompts_for
from tests.system.answers.test_tokens import memory_bus, prompts_for, tight
from tests.system.harness import running
from tests.system.serving import serving

pytestmark = pytest.mark.share(6)

NUM_PROMPTS, NUM_TOKENS = 12, 8
FORMATS = {
    "fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "int8_per_token_head": torch.int8
}  # fmt: skip
CASES = [
    (REFERENCE_CONFIGS[3], "fp8"), (REFERENCE_CONFIGS[7], "fp8_e5m2"), (REFERENCE_CONFIGS[12], "fp8"),
    (REFERENCE_CONFIGS[3], "int8"), (REFERENCE_CONFIGS[8], "int8"), (REFERENCE_CONFIGS[5], "int8_per_token_head"),
]  # fmt: skip


class RoundedCache(DynamicCache):
    """Keeps what a cache of one byte would give back. ``scales`` [layers, 2, Hkv] are for float8."""

    def __init__(self, config: Any, dtype: torch.dtype, scales: torch.Tensor) -> None:
        super().__init__(config=config)
        self.dtype, self.scales = dtype, scales

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any) -> Any:
        rounded = []
        for part, states in enumerate((key_states, value_states)):
            if self.dtype == torch.int8:
                rounded.append(from_int8_reference(*to_int8_reference(states, part), part))
                continue
            scale, largest = self.scales[layer_idx, part].view(-1, 1, 1), torch.finfo(self.dtype).max
            rounded.append((states / scale).clamp(-largest, largest).to(self.dtype).float() * scale)
        return super().update(*rounded, layer_idx, *rest)


def expected_tokens(folder: Path, prompts: list[list[int]], dtype: torch.dtype, scales: torch.Tensor) -> Any:
    model = load_reference(folder)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    answers = []
    for prompt in prompts:
        ids, cache = torch.tensor([prompt]), RoundedCache(model.config, dtype, scales)
        words = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_TOKENS, "do_sample": False}
        with torch.inference_mode():
            answers.append(model.generate(ids, past_key_values=cache, **words)[0, len(prompt) :].tolist())
    return answers


def calculated(folder: Path) -> torch.Tensor:
    model = build_model(ModelConfig.load(folder), torch.device("cpu"), torch.float32, Ops.reference())
    load_weights(model, folder, "auto", 0, lambda _: None)
    return calculate_scales(model)


def agreement(got: list[Any], expected: list[Any]) -> float:
    """The share of answers that are equal. Sums in another order round a number to its other neighbour now and then."""
    return sum(a == b for a, b in zip(got, expected, strict=True)) / len(expected)


@pytest.mark.parametrize(("config", "name"), CASES, ids=[f"{config.name}-{name}" for config, name in CASES])
async def test_equals_transformers_with_a_rounded_cache(config: ReferenceConfig, name: str, tmp_path: Path) -> None:
    """In chunks, from the prefix cache, and after swapping, by the scales that were calculated at start or are the
    tokens' own."""
    folder, prompts = make_reference(tmp_path, config), prompts_for(config.vocab_size, NUM_PROMPTS)
    expected = expected_tokens(folder, prompts, FORMATS[name], calculated(folder))
    assert agreement(reference_generate(folder, prompts, NUM_TOKENS), expected) < 0.9  # the rounding shows
    swapping = {**tight(folder), "preemption_mode": "swap"}

    for options in ({}, swapping):
        async with running(folder, memory_bus(), kv_cache_dtype=name, max_num_batched_tokens=64, **options) as system:
            for _ in range(2):
                got = await system.generate(prompts, max_tokens=NUM_TOKENS)
                assert agreement(got, expected) >= 0.9
            replica = system.scheduler.core.replicas["executor-0"]
            assert sum(system.collector.cached.values()) > 0
            assert bool(options) == (replica.host_tier.num_in > 0)


async def test_beams_over_int8_copy_blocks_with_their_scales(tmp_path: Path) -> None:
    """Beams part in the middle of blocks, which are copied then; whether they keep their blocks, are swapped out or are
    computed again, they come to the same, but where a sum's last bit rounds a number to its other neighbour."""
    folder = make_reference(tmp_path, REFERENCE_CONFIGS[3])
    calls = list(zip(beam_prompts_for(REFERENCE_CONFIGS[3].vocab_size), SEARCHES, strict=True))
    common = {"use_beam_search": True, "ignore_eos": True, "return_token_ids": True}
    found = []
    for settings in CONDITIONS.values():
        limits = {"max_num_batched_tokens": 32, "max_model_len": 80, "max_num_seqs": 16}
        async with serving(folder, kv_cache_dtype="int8", **limits, **settings) as client:
            answers = await asyncio.gather(*(client.completion(prompt, **each, **common) for prompt, each in calls))
            found.append([[choice["token_ids"] for choice in answer["choices"]] for answer in answers])
            if settings:
                await eventually(lambda client=client: preempted(client))
    for again in found[1:]:
        assert agreement(again, found[0]) >= 0.8
