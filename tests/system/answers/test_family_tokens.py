"""Every family through the whole pipeline: greedy tokens in float32 are transformers', over both buses.

Each case runs 32 requests, one alone and all together, and all again behind prefixes that are known by then. A run of
everything takes an hour on two cores: ``make families``. Otherwise there is one model of each kind over one bus, with
half as many requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.model.families.registry import FAMILIES
from pagebus.bus.contract import Bus
from tests.actors.executor.models.test_families import reference_tokens
from tests.helpers.model_factory import DEFAULTS, make_golden, num_pages
from tests.system.answers.test_tokens import NUM_PROMPTS, memory_bus, prompts_for
from tests.system.harness import OpenBus, System, running

pytestmark = pytest.mark.share(3)

FEW_PROMPTS = 16
NUM_TOKENS = 40
"""Each sequence grows by two blocks and more, so that a small pool has to preempt in whatever order they come."""
FULL = os.environ.get("PAGEBUS_TEST_FAMILIES") == "full"
MODEL_TYPES = {name: (family.model_type, fields) for family in FAMILIES for name, fields in family.golden.items()}
TIGHT = {"num_gpu_blocks_override": 14, "max_model_len": 128, "max_num_batched_tokens": 64}
WAYS: dict[str, dict[str, Any]] = {
    "chunks of 16": {"max_num_batched_tokens": 16},
    "chunks of 64": {"max_num_batched_tokens": 64},
    "chunks of 2048": {"max_num_batched_tokens": 2048},
    "recomputed": {**TIGHT, "preemption_mode": "recompute"},
    "swapped": {**TIGHT, "preemption_mode": "swap"},
}
KINDS = (
    ("gemma3", "memory", "swapped"),  # windows in some layers
    ("gemma2-odd", "redis", "recomputed"),  # soft caps
    ("cohere2-odd", "memory", "swapped"),  # both parts of a layer at once, layers that turn nothing
    ("glm4-moe-groups", "redis", "swapped"),  # experts
    ("llama4-odd", "memory", "recomputed"),  # chunks, experts of weighted inputs
    ("starcoder2", "redis", "chunks of 16"),  # layer norms, no gates
    ("gpt-oss-odd", "memory", "swapped"),  # sinks, experts with biases
)
CASES = [(name, bus, way) for name in MODEL_TYPES for bus in ("memory", "redis") for way in WAYS] if FULL else KINDS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]], list[list[int]]]]:
    """Folder, prompts and transformers' answers of a tiny model, made once."""

    @cache
    def make(name: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        model_type, fields = MODEL_TYPES[name]
        folder = make_golden(tmp_path_factory.mktemp(name), model_type, fields)
        prompts = prompts_for(DEFAULTS["vocab_size"], NUM_PROMPTS if FULL else FEW_PROMPTS)
        return folder, prompts, reference_tokens(folder, prompts, NUM_TOKENS)

    return make


def limits_of(name: str) -> dict[str, Any]:
    """Longrope goes by the longest length of the process, and transformers by that of the sequence: short ones here."""
    fields = MODEL_TYPES[name][1]
    rope = fields.get("rope_parameters", {})
    if rope.get("rope_type") != "longrope":
        return {}
    length = "original_max_position_embeddings"
    return {"max_model_len": rope.get(length) or fields[length]}


async def check(system: System, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """As far as transformers' logits leave no doubt."""
    got = await system.generate(prompts, max_tokens=NUM_TOKENS)
    assert [tokens[: len(known)] for tokens, known in zip(got, expected, strict=True)] == expected


@pytest.mark.parametrize(("name", "bus", "way"), CASES)
async def test_tokens_equal_transformers(
    name: str, bus: str, way: str, models: Callable[[str], Any], redis_bus_factory: Callable[[], Bus]
) -> None:
    """Alone, together and again; a pool of 14 blocks preempts, and copies to the host if told so."""
    folder, prompts, expected = models(name)
    open_bus: OpenBus = memory_bus() if bus == "memory" else redis_bus_factory
    options = {**limits_of(name), **WAYS[way]}
    if "num_gpu_blocks_override" in options:
        options["num_gpu_blocks_override"] *= num_pages(folder)

    async with running(folder, open_bus, **options) as system:
        await check(system, prompts[7:8], expected[7:8])
        await check(system, prompts, expected)
        await check(system, prompts, expected)

        replica = system.scheduler.core.replicas["executor-0"]
        tight = "num_gpu_blocks_override" in options
        assert (replica.counts.num_preemptions > 0) == tight
        assert way != "swapped" or replica.host_tier.num_in > 0
        assert tight or sum(system.collector.cached.values()) >= 16 * (len(prompts) // 2)
    assert sum(map(len, expected)) > len(prompts) * NUM_TOKENS * 3 // 4


def test_one_model_of_each_kind() -> None:
    """Those that are always run exist, over both buses and in every way that preempts."""
    assert [name for name, _, _ in KINDS if name not in MODEL_TYPES] == []
    assert {bus for _, bus, _ in KINDS} == {"memory", "redis"}
    assert {"recomputed", "swapped"} <= {way for _, _, way in KINDS} <= set(WAYS)
