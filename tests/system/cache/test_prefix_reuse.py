"""Turns of a chat, the whole way through real actors: what an answer has put into the cache, the next turn finds."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import GenerateRequest, SamplingParams
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.helpers.waiting import LIMIT_S
from tests.system.harness import System, running
from tests.system.serving import serving

BLOCK = 16


async def ask(system: System, name: str, prompt: list[int], max_tokens: int, salt: str | None) -> list[int]:
    """One greedy request of a tenant; its output tokens."""
    message = GenerateRequest(
        request_id=name,
        ingress="test",
        sampling=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
        cache_salt=salt,
        prompt_token_ids=np.array(prompt, np.int32),
    )
    future = system.collector.expect(name)
    await system.bus.publish([(system.names.requests, message)])
    async with asyncio.timeout(LIMIT_S):
        return await future


async def test_the_next_turn_finds_the_answer_but_no_other_tenant_does(tmp_path):
    """The second turn's cached tokens cover the first turn's answer, and its tokens are transformers' all the same."""
    config = REFERENCE_CONFIGS[0]
    folder, rng = make_reference(tmp_path / "model", config), random.Random(3)
    first = [rng.randrange(config.vocab_size) for _ in range(21)]
    server = MemoryServer()
    async with running(folder, lambda: MemoryBus(server)) as system:
        answer = await ask(system, "first", first, 40, "tenant")
        second = [*first, *answer, *(rng.randrange(config.vocab_size) for _ in range(7))]
        outputs = [await ask(system, name, second, 8, name[:6]) for name in ("tenant's second", "strang")]

        whole_blocks = (len(first) + len(answer) - 1) // BLOCK * BLOCK
        assert whole_blocks > len(first)
        assert system.collector.cached == {"first": 0, "tenant's second": whole_blocks, "strang": 0}
        (expected,) = reference_generate(folder, [second], 8)
        assert outputs == [expected, expected]
        (replica,) = system.scheduler.core.replicas.values()
        assert (replica.counts.prefix_queries, replica.counts.prefix_hits) == (
            len(first) + 2 * len(second),
            whole_blocks,
        )


@pytest.mark.parametrize("length", [33, 40, 48])
async def test_four_choices_share_the_prompt_and_equal_transformers(tmp_path, length):
    """Forks copy the last block of the prompt and give the very tokens; the usage counts no choice as a hit."""
    config = REFERENCE_CONFIGS[0]
    folder, rng = make_reference(tmp_path / "model", config), random.Random(length)
    prompt = [rng.randrange(config.vocab_size) for _ in range(length)]
    (expected,) = reference_generate(folder, [prompt], 20)
    async with serving(folder) as client:
        for cached in (0, (length - 1) // BLOCK * BLOCK):
            answer = await client.completion(prompt, n=4, max_tokens=20, ignore_eos=True, return_token_ids=True)
            assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 4
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
