"""Order and pace through real actors: they change when tokens come, never which."""

from __future__ import annotations

import asyncio
import random

from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.system.harness import running
from tests.system.serving import serving

TINY_ITL_MS = 0.1


async def test_paced_prefill_changes_no_token(tmp_path):
    """With a target that no step can keep, long prompts are read in the least chunks beside the streams."""
    config, rng = REFERENCE_CONFIGS[0], random.Random(5)
    folder = make_reference(tmp_path / "model", config)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(length)] for length in (5, 9, 300)]
    expected = reference_generate(folder, prompts[:2], 150) + reference_generate(folder, prompts[2:], 48)
    server = MemoryServer()
    async with running(folder, lambda: MemoryBus(server), itl_target_ms=TINY_ITL_MS, ttft_target_ms=1.0) as system:
        streams = [system.submit(prompt, max_tokens=150) for prompt in prompts[:2]]
        while not all(system.collector.tokens.get(name) for name, _ in streams):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        (replica,) = system.scheduler.core.replicas.values()
        before = replica.step
        (third,) = await system.generate(prompts[2:], max_tokens=48)
        assert [await future for _, future in streams] + [third] == expected
        assert replica.step - before > 48 + 3, "the prompt was read at once"


async def test_a_priority_is_taken_or_refused(tmp_path):
    """As the server was started."""
    folder = make_reference(tmp_path / "model", REFERENCE_CONFIGS[0])
    async with serving(folder) as client:
        assert (await client.refused("completions", prompt=[1, 2, 3], priority=1))["param"] == "priority"
    async with serving(folder, scheduling_policy="priority") as client:
        answer = await client.completion([1, 2, 3], priority=-3, max_tokens=2, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 2
