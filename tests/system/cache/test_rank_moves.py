"""Blocks that move between groups of ranks over a real Redis, of the same size and of a doubled one: a prefix, and all
that runs in a drain, with the very same tokens."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.helpers.model_factory import make_model, reference_generate
from tests.helpers.waiting import until
from tests.system.cache.test_moves import BLOCK, FIRST, SECOND, only, prompt, way
from tests.system.harness import System, running

pytestmark = pytest.mark.share(4)

__all__ = ["way"]  # a fixture

COUNT, LONG, EARLY = 8, 80, 16
SAMPLED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups") / "model"
    return make_model(
        folder, "llama2", seed=23, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024
    )


async def long_answers(system: System, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy and sampled ones."""
    futures = [system.submit(each, max_tokens=LONG, **how)[1] for each, how in zip(prompts, SAMPLED, strict=True)]
    return [await each for each in futures]


@pytest.mark.parametrize(("way", "ranks"), [("host", (2, 2)), ("network", (1, 2))], indirect=["way"])
async def test_groups_go_on_with_blocks_of_each_other(
    model: Path, redis_url: str, redis_names: Names, way: str, ranks: tuple[int, int]
) -> None:
    """The second pulls a prefix of the first, and then all that runs there as it drains."""
    rng = random.Random(1)
    prefix, *others = (prompt(rng, length) for length in (250, 90, 40, 60))
    asked = [*prefix, *prompt(rng, 5)]
    options: dict[str, Any] = {"name": redis_names.deployment, "kv_moves": way, "max_model_len": 1000}
    options |= {"executors": 1, "tensor_parallel_size": ranks[0]}
    async with running(model, partial(RedisBus, redis_url, redis_names), **options) as system:
        core, collector = system.scheduler.core, system.collector
        await system.add_executor(SECOND, ranks[1])
        await until(lambda: SECOND in core.replicas)
        only(core, FIRST)
        await system.generate([prefix], max_tokens=1)
        expected = await long_answers(system, others)
        only(core, SECOND)
        request_id, answer = system.submit(asked, max_tokens=COUNT)
        assert await answer == reference_generate(model, [asked], COUNT)[0]
        assert collector.cached[request_id] == len(prefix) // BLOCK * BLOCK
        second = core.replicas[SECOND].moves
        assert (second.num_pulled, second.num_failed) == (len(prefix) // BLOCK, 0)

        only(core, FIRST)
        again = [system.submit(each, max_tokens=LONG, **how) for each, how in zip(others, SAMPLED, strict=True)]
        await until(lambda: all(len(collector.tokens.get(each, ())) >= EARLY for each, _ in again))
        del core.replicas[SECOND].is_open
        await system.remove_executor(FIRST)
        assert [await each for _, each in again] == expected
        assert second.num_pulled > len(prefix) // BLOCK + sum(len(each) // BLOCK for each in others)
        assert second.num_failed == 0
        assert {where for each, _ in again for _, where in collector.came[each][-1:]} == {system.names.results(SECOND)}
