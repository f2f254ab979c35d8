"""Executors join and leave while requests run; clients leave while requests run: no token changes, nothing is left."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import AbortRequest
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.system.harness import running

CONFIG = REFERENCE_CONFIGS[0]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = make_reference(tmp_path_factory.mktemp("model"), CONFIG)
    rng = random.Random(3)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randint(2, 40))] for _ in range(24)]
    return folder, prompts, reference_generate(folder, prompts, NUM_TOKENS)


async def test_an_executor_that_joins_takes_part(case):
    """A second executor that starts under load computes some of the load."""
    folder, prompts, expected = case
    server = MemoryServer()
    async with running(folder, lambda: MemoryBus(server), max_num_seqs=4) as system:
        running_requests = asyncio.ensure_future(system.generate(prompts, max_tokens=NUM_TOKENS))
        await system.until_tokens(20)
        await system.add_executor("executor-1")
        assert expected == await running_requests
        again = await system.generate(prompts, max_tokens=NUM_TOKENS)

        assert expected == again
        assert system.collector.tokens_from[system.names.results("executor-1")] > 0


@pytest.mark.parametrize("how", ["drains", "dies"])
async def test_requests_of_an_executor_that_leaves_go_on_elsewhere(case, how):
    """Sequences of a drained or killed executor are recomputed on the other one and lose no token."""
    folder, prompts, expected = case
    server = MemoryServer()
    async with running(folder, lambda: MemoryBus(server), executors=2, lease_ttl_s=1.0) as system:
        running_requests = asyncio.ensure_future(system.generate(prompts, max_tokens=NUM_TOKENS))
        await system.until_tokens(100)
        await (system.remove_executor("executor-1") if how == "drains" else system.kill("executor-1"))

        assert expected == await running_requests


async def test_two_hundred_aborted_requests_leave_nothing(case):
    """Aborts at random moments, queued, in prefill and in decode, free every block, slot and stream entry."""
    folder, prompts, expected = case
    server = MemoryServer()
    rng = random.Random(11)
    async with running(folder, lambda: MemoryBus(server), max_num_seqs=16, max_num_batched_tokens=64) as system:
        ids = []
        for number in range(200):
            prompt = list(np.random.default_rng(number).integers(0, CONFIG.vocab_size, rng.randint(1, 60)))
            request_id, _ = system.submit([int(token) for token in prompt], max_tokens=100)
            ids.append(request_id)
            if rng.random() < 0.3:
                await asyncio.sleep(0.005)
            if rng.random() < 0.5:
                await abort(system, ids.pop(rng.randrange(len(ids))))
        for request_id in ids:
            await abort(system, request_id)
        await system.until_clean()

        assert expected == await system.generate(prompts, max_tokens=NUM_TOKENS)


async def abort(system, request_id: str) -> None:
    await system.bus.publish([(system.names.control, AbortRequest(request_id=request_id))])
