"""Models with windows, in pools far smaller than their contexts: greedy tokens are transformers'.

Blocks behind the window are given to others while a sequence runs, so any read of them gives wrong tokens. Where only
some layers have a window, so are the pages of these.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.actors.executor.models.test_families import reference_tokens
from tests.helpers.model_factory import DEFAULTS, make_golden
from tests.system.answers.test_family_tokens import MODEL_TYPES
from tests.system.answers.test_tokens import memory_bus
from tests.system.harness import System, running

pytestmark = pytest.mark.share(6)

NUM_TOKENS = 40
SMALL = {"max_model_len": 256, "max_num_batched_tokens": 32}
"""The longest context takes 15 blocks of 16 tokens; a window of 33 and a step of 32 take 5."""
WAYS: dict[str, dict[str, Any]] = {
    "hits": {**SMALL, "num_gpu_blocks_override": 24, "max_num_seqs": 2},
    "recomputed": {**SMALL, "num_gpu_blocks_override": 8, "preemption_mode": "recompute"},
    "swapped": {**SMALL, "num_gpu_blocks_override": 8, "preemption_mode": "swap"},
    "one at a time": {**SMALL, "num_gpu_blocks_override": 6, "max_num_seqs": 1, "pipeline_depth": 4},
}
CASES = (
    ("mistral", "hits"), ("mistral", "recomputed"), ("starcoder2-plain", "swapped"), ("phi3", "one at a time"),
)  # fmt: skip
WINDOWED_PAGES = {"gemma3": 1, "gpt-oss": 2}
GROUPED = (("gemma3", "hits"), ("gpt-oss", "swapped"))
ALL_BLOCKS = 16
"""Of the longest context."""


def prompts_for(vocab_size: int) -> list[list[int]]:
    """Prompts of up to 200 tokens: some begin alike for several windows, two are the same."""
    rng = random.Random(11)
    shared = [rng.randrange(vocab_size) for _ in range(128)]
    whole = [[rng.randrange(vocab_size) for _ in range(length)] for length in (200, 97, 3, 9, 14, 15, 20)]
    return [*whole, *(shared + [rng.randrange(vocab_size) for _ in range(rest)] for rest in (70, 5)), whole[0]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]], list[list[int]]]]:
    """Folder, prompts and transformers' answers of a tiny model, made once."""

    @cache
    def make(name: str) -> tuple[Path, list[list[int]], list[list[int]]]:
        folder = make_golden(tmp_path_factory.mktemp(name), *MODEL_TYPES[name])
        prompts = prompts_for(DEFAULTS["vocab_size"])
        return folder, prompts, reference_tokens(folder, prompts, NUM_TOKENS)

    return make


async def check(system: System, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """As far as transformers' logits leave no doubt."""
    got = await system.generate(prompts, max_tokens=NUM_TOKENS)
    assert [tokens[: len(known)] for tokens, known in zip(got, expected, strict=True)] == expected


@pytest.mark.parametrize(("name", "way"), CASES)
async def test_tokens_equal_transformers(name: str, way: str, models: Callable[[str], Any]) -> None:
    """One by one, together and again."""
    await run_all(WAYS[way], way, *models(name))


@pytest.mark.parametrize(("name", "way"), GROUPED)
async def test_windows_in_some_layers(name: str, way: str, models: Callable[[str], Any]) -> None:
    """The same, where layers without a window keep everything: their pages come on top of those of the others."""
    pages, windows = WINDOWED_PAGES[name], WAYS[way]["num_gpu_blocks_override"]
    num_sequences = WAYS[way].get("max_num_seqs", 1)
    options = {**WAYS[way], "num_gpu_blocks_override": num_sequences * ALL_BLOCKS + pages * windows}
    system = await run_all(options, way, *models(name))
    assert system.scheduler.core.replicas["executor-0"].windowed_pages == pages


async def test_a_takeover_and_a_loss(models: Callable[[str], Any]) -> None:
    """With windows in some layers: the scheduler is killed in mid-run, then one of two executors."""
    folder, prompts, expected = models("gemma3")
    options = {**SMALL, "num_gpu_blocks_override": ALL_BLOCKS + 8, "preemption_mode": "swap", "max_num_seqs": 2}
    async with running(folder, memory_bus(), executors=2, lease_ttl_s=1.0, **options) as system:
        checking = asyncio.ensure_future(check(system, prompts, expected))
        await system.until_tokens(80)
        assert_in_mid_run(system)
        before = sum(map(len, system.collector.tokens.values()))
        await system.replace_scheduler()
        await system.until_tokens(before + 80)
        assert_in_mid_run(system)
        await system.kill("executor-1")
        await checking
        await check(system, prompts, expected)


def assert_in_mid_run(system: System) -> None:
    """There is work, and windowed pages have been given back."""
    core = system.scheduler.core
    assert core.requests
    assert all(replica.windowed_pages == 1 for replica in core.replicas.values())
    assert sum(replica.counts.num_given_back for replica in core.replicas.values()) > 0


async def run_all(
    options: dict[str, Any], way: str, folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> System:
    """One by one, together and again, on a small deployment."""
    async with running(folder, memory_bus(), **options) as system:
        for index in (0, 7, 8):
            await check(system, prompts[index : index + 1], expected[index : index + 1])
        await check(system, prompts, expected)
        await check(system, prompts, expected)

        replica = system.scheduler.core.replicas["executor-0"]
        assert replica.counts.num_given_back > 3 * len(prompts)
        assert replica.counts.num_preemptions > 0 or way not in ("recomputed", "swapped")
        assert way != "swapped" or replica.host_tier.num_in > 0
        if way == "hits":
            assert replica.counts.prefix_hits >= 4 * 128
    assert sum(map(len, expected)) > len(prompts) * NUM_TOKENS // 2
    return system
