"""The acceptance of the engine: greedy output in float32 equals transformers, token for token.

Each case starts real actors (tokenizer, scheduler, executors) and compares every token of 32 concurrent requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, num_pages, reference_generate
from tests.system.harness import OpenBus, System, running

pytestmark = pytest.mark.share(6)

NUM_PROMPTS = 32
NUM_TOKENS = 16
each = pytest.mark.parametrize("config", REFERENCE_CONFIGS, ids=lambda config: config.name)
some = pytest.mark.parametrize("config", REFERENCE_CONFIGS[::2], ids=lambda config: config.name)
"""Of every architecture one or two."""
one = pytest.mark.parametrize("config", REFERENCE_CONFIGS[::3], ids=lambda config: config.name)
"""Of every architecture one, for what knows nothing of it."""


def prompts_for(vocab_size: int, count: int = NUM_PROMPTS) -> list[list[int]]:
    """Prompts of 1 to 70 tokens; the last third begin alike, so that prefix caching has something to find."""
    rng = random.Random(7)
    shared = [rng.randrange(vocab_size) for _ in range(40)]
    lengths = [1, 2, 15, 16, 17, 33, 64, 70] + [rng.randint(3, 50) for _ in range(count - 8)]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    return prompts[: count * 2 // 3] + [shared + prompt[:9] for prompt in prompts[count * 2 // 3 :]]


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[object], tuple[Path, list[list[int]], list[list[int]]]]:
    """Model folder, prompts and transformers' answers of a reference configuration, made once."""

    @cache
    def make(config: object) -> tuple[Path, list[list[int]], list[list[int]]]:
        folder = make_reference(tmp_path_factory.mktemp("model"), config)
        prompts = prompts_for(config.vocab_size)  # type: ignore[attr-defined]
        return folder, prompts, reference_generate(folder, prompts, NUM_TOKENS)

    return make


def tight(folder: Path) -> dict[str, int]:
    """Settings with a pool of 8 blocks, which one sequence of the greatest length fills."""
    return {"num_gpu_blocks_override": 8 * num_pages(folder), "max_model_len": 128}


def memory_bus() -> OpenBus:
    server = MemoryServer()
    return lambda: MemoryBus(server)


async def check(system: System, prompts: list[list[int]], expected: list[list[int]]) -> None:
    got = await system.generate(prompts, max_tokens=NUM_TOKENS)

    assert expected == got


@each
async def test_equals_transformers_alone_together_and_in_chunks(config, models):
    """Batch 1, 32 at once, and prefill in chunks of a 64-token budget give transformers' tokens."""
    folder, prompts, expected = models(config)

    async with running(folder, memory_bus(), max_num_batched_tokens=64) as system:
        for index in (0, 7, 31):
            await check(system, prompts[index : index + 1], expected[index : index + 1])
        await check(system, prompts, expected)


@some
async def test_equals_transformers_at_any_budget(config, models):
    """The token budget changes the chunks, never the tokens: chunks of a block, or whole prompts."""
    folder, prompts, expected = models(config)

    budget = (16, 2048)[REFERENCE_CONFIGS.index(config) // 2 % 2]
    async with running(folder, memory_bus(), max_num_batched_tokens=budget) as system:
        await check(system, prompts, expected)


@some
async def test_prefix_hits_change_no_token(config, models):
    """The second time the same prompts are read from the cache, and give the same tokens."""
    folder, prompts, expected = models(config)

    async with running(folder, memory_bus()) as system:
        await check(system, prompts, expected)
        await check(system, prompts, expected)

        assert sum(system.collector.cached.values()) >= 16 * (NUM_PROMPTS // 2)


@some
async def test_preemption_changes_no_token(config, models):
    """With a pool of 8 blocks for 32 requests sequences are preempted and recomputed, and give the same tokens."""
    folder, prompts, expected = models(config)

    async with running(folder, memory_bus(), max_num_batched_tokens=64, **tight(folder)) as system:
        await check(system, prompts, expected)

        assert system.scheduler.core.num_preemptions > 0


@some
async def test_swap_changes_no_token(config, models):
    """With a pool of 8 blocks for 32 requests sequences are preempted, and go on from blocks kept on the host."""
    folder, prompts, expected = models(config)

    async with running(
        folder, memory_bus(), max_num_batched_tokens=64, preemption_mode="swap", **tight(folder)
    ) as system:
        await check(system, prompts, expected)

        replica = system.scheduler.core.replicas["executor-0"]
        assert replica.counts.num_preemptions > 0
        assert replica.host_tier.num_out > 0
        assert replica.host_tier.num_in > 0


@some
async def test_host_tier_prefix_hits_change_no_token(config, models):
    """Prompts that fell out of a device tier of 8 blocks are found in the host tier, and give the same tokens."""
    folder, prompts, expected = models(config)

    async with running(folder, memory_bus(), preemption_mode="swap", max_num_seqs=1, **tight(folder)) as system:
        await check(system, prompts[:12], expected[:12])
        replica = system.scheduler.core.replicas["executor-0"]
        before = replica.host_tier.num_hits
        await check(system, prompts[:12], expected[:12])

        assert replica.host_tier.num_hits - before >= 16 * 8
        assert sum(system.collector.cached.values()) >= replica.host_tier.num_hits


@one
async def test_equals_transformers_over_redis_with_two_executors(config, models, redis_bus_factory):
    """The same over real Redis with two executors, both of which take part."""
    folder, prompts, expected = models(config)

    async with running(folder, redis_bus_factory, executors=2) as system:
        await check(system, prompts, expected)

        assert sorted(system.collector.tokens_from) == [system.names.results(f"executor-{i}") for i in range(2)]
