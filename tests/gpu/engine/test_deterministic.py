"""``--deterministic`` from end to end: over HTTP and Redis, at the size of a real model, in bfloat16."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from pagebus.actors.bench.driver.deployment import as_served, deployed
from pagebus.actors.settings import Settings
from pagebus.bus.private_redis.server import find_redis_server
from tests.helpers.waiting import LIMIT_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH"),
    pytest.mark.filterwarnings("ignore"),
]

NUM_TOLD, NUM_OTHERS, MAX_TOKENS = 12, 244, 48
Body = dict[str, Any]


def bodies(vocab_size: int, count: int, seed: int) -> list[Body]:
    """Completions of prompts of 1 to 3000 tokens, every second one sampled."""
    rng = random.Random(seed)
    lengths = [rng.choice((1, 17, 64, 100, 500, 1000, 3000)) for _ in range(count)]
    return [
        {
            "prompt": [rng.randrange(vocab_size) for _ in range(length)], "max_tokens": MAX_TOKENS, "ignore_eos": True,
            "temperature": 0.9 * (i % 2), "seed": seed + i, "logprobs": 1, "return_token_ids": True,
        }
        for i, length in enumerate(lengths)
    ]  # fmt: skip


async def answer(session: aiohttp.ClientSession, url: str, body: Body) -> tuple[list[int], list[float]]:
    """The tokens of one completion and their log probabilities."""
    async with session.get(f"{url}/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    async with session.post(f"{url}/v1/completions", json={**body, "model": model}) as response:
        assert response.status == 200, await response.text()
        choice = (await response.json())["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def until_counted(session: aiohttp.ClientSession, url: str, *names: str) -> None:
    """Wait until each of these metrics is above 0."""
    async with asyncio.timeout(LIMIT_S):
        while names:
            async with session.get(f"{url}/metrics") as response:
                text = await response.text()
            samples = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
            counted = {sample.split("{")[0] for sample, value in samples if float(value) > 0}
            names = tuple(name for name in names if name not in counted)
            await asyncio.sleep(0.1)


async def answers(folder: Path) -> tuple[list[Any], ...]:
    """Of the same requests: each alone; all of them among many others, with none of the prompts in the prefix cache,
    and with all of them there as far as the many leave room. There are blocks for about a third of these at a time."""
    settings = Settings(
        model="qwen06b", deterministic=True, max_num_seqs=256, max_model_len=4096, num_gpu_blocks_override=4000,
        preemption_mode="recompute",
    )  # fmt: skip
    async with (
        deployed(as_served(settings, folder), folder / "serve.log") as deployment,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120), connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        url, told = deployment.base_url, bodies(deployment.vocab_size, NUM_TOLD, seed=1)
        alone = [await answer(session, url, body) for body in told]
        crowded = []
        for seed, salt in ((1000, "first"), (2000, "second"), (3000, "second")):
            everybody = told + bodies(deployment.vocab_size, NUM_OTHERS, seed)
            order = random.Random(seed).sample(range(len(everybody)), len(everybody))
            found = await asyncio.gather(
                *(answer(session, url, {**everybody[i], "cache_salt": salt}) for i in order)
            )  # fmt: skip
            crowded.append([found[order.index(i)] for i in range(NUM_TOLD)])
        again = [await answer(session, url, {**body, "cache_salt": "second"}) for body in told]
        await until_counted(session, url, "pagebus:recompute_preemptions_total", "vllm:prefix_cache_hits_total")
        return alone, *crowded, again


def test_a_request_gets_the_same_alone_and_in_a_full_batch(tmp_path: Path) -> None:
    """Tokens and every bit of their log probabilities, greedy and sampled, in three different companies, in which
    sequences are preempted and computed again, and alone once more, with the prompt in the prefix cache."""
    alone, *others = asyncio.run(answers(tmp_path))

    assert {len(tokens) for tokens, _ in alone} == {MAX_TOKENS}
    differing = [[i for i in range(NUM_TOLD) if other[i] != alone[i]] for other in others]
    assert differing == [[]] * 4
