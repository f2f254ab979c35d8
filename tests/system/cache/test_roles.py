"""Roles over a real Redis: one executor computes long prompts, the other goes on with them; the tokens are the same."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from pagebus.actors.scheduler.fleet import auto_roles, roles
from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.helpers.waiting import until
from tests.system.harness import running

CONFIG = replace(REFERENCE_CONFIGS[0], overrides=REFERENCE_CONFIGS[0].overrides | {"max_position_embeddings": 2048})
COUNT = 40
PREFILL, DECODE = "executor-0", "executor-1"


@pytest.fixture(autouse=True)
def all_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast this machine computes them, and however busy it is."""
    monkeypatch.setattr(roles, "LEAST_PREFILL_S", 1e-6)
    monkeypatch.setattr(ReadRate, "tokens", lambda *_: None)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_prompts_are_computed_on_one_and_decoded_on_the_other(
    ranks: int, tmp_path: Path, redis_url: str, redis_names: Names
) -> None:
    """Each sequence gets its first token from the one, and its last from the other, which has pulled its blocks."""
    model = make_reference(tmp_path / "model", CONFIG)
    rng = random.Random(3)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(length)] for length in (33, 250, 120, 400)]
    expected = reference_generate(model, prompts, COUNT)
    options = {"name": redis_names.deployment, "roles": "prefill=1,decode=1", "tensor_parallel_size": ranks}
    async with running(model, lambda: RedisBus(redis_url, names=redis_names), executors=2, **options) as system:
        core, names = system.scheduler.core, system.names
        await until(lambda: len(core.replicas) == 2)
        asked = [system.submit(prompt, max_tokens=COUNT, ignore_eos=True) for prompt in prompts]
        assert await asyncio.gather(*(answer for _, answer in asked)) == expected
        for request_id, _ in asked:
            came = [stream for _, stream in system.collector.came[request_id]]
            assert (came[0], came[-1]) == (names.results(PREFILL), names.results(DECODE))
        assert core.replicas[DECODE].moves.num_pulled == core.replicas[PREFILL].moves.num_lent > 0
        assert core.num_preemptions == 0


async def test_roles_come_with_the_load_while_streams_run(
    tmp_path: Path, redis_url: str, redis_names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First both do both, then one computes prompts, then both do both again: every answer is the same as ever. What
    the load asks for is said here, for machines differ in what they take for much."""
    wanted = [0]
    monkeypatch.setattr(auto_roles, "best", lambda *_: wanted[0])
    monkeypatch.setattr(auto_roles, "LOOK_S", 0.01)
    monkeypatch.setattr(auto_roles, "STAY_S", 0.0)
    model = make_reference(tmp_path / "model", CONFIG)
    rng = random.Random(5)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(length)] for length in (33, 250, 120, 400) * 3]
    expected = reference_generate(model, prompts, COUNT)
    options = {"name": redis_names.deployment, "roles": "auto"}
    async with running(model, lambda: RedisBus(redis_url, names=redis_names), executors=2, **options) as system:
        core = system.scheduler.core
        await until(lambda: len(core.replicas) == 2)
        told = []
        for number in (0, 1, 0):
            wanted[0] = number
            asked = [system.submit(prompt, max_tokens=COUNT, ignore_eos=True) for prompt in prompts]
            while core.planner.roles.num_prefill != number:
                more = system.submit(prompts[0], max_tokens=COUNT, ignore_eos=True)[1]
                assert await more == expected[0]
            told.append({name: core.planner.roles.role(replica) for name, replica in core.replicas.items()})
            assert await asyncio.gather(*(answer for _, answer in asked)) == expected
        assert told == [{PREFILL: "", DECODE: ""}, {PREFILL: "prefill", DECODE: "decode"}, {PREFILL: "", DECODE: ""}]
