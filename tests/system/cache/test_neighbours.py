"""Preemption to a neighbour over a real Redis: a sequence without blocks goes on on the other executor; the tokens are
the same."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.scheduler.core import admission
from pagebus.actors.scheduler.core.placement import choose
from pagebus.actors.scheduler.fleet.fleet import Fleet, Rows
from pagebus.actors.scheduler.kv.read_rate import ReadRate
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import Names
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference, reference_generate
from tests.helpers.waiting import until
from tests.system.harness import running

CONFIG = replace(REFERENCE_CONFIGS[0], overrides=REFERENCE_CONFIGS[0].overrides | {"max_position_embeddings": 2048})
COUNT = 48
FULL, FREE = "executor-0", "executor-1"


@pytest.fixture(autouse=True)
def all_begin_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences without a token go to the first executor. However slow this machine copies, the link counts as fast."""

    def on_the_first(sequence: Sequence, fleet: Fleet, able: Rows, pulls: Any) -> Any:
        if not sequence.produced:
            able = able.copy()
            able[fleet.row(FREE)] = False
        return choose(sequence, fleet, able, pulls)

    monkeypatch.setattr(admission, "choose", on_the_first)
    monkeypatch.setattr(ReadRate, "tokens", lambda *_: None)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
async def test_who_has_no_block_goes_on_elsewhere(
    sampling: dict[str, Any], tmp_path: Path, redis_url: str, redis_names: Names
) -> None:
    """Three sequences grow on an executor with blocks for two and a half: one ends on the other, with its blocks."""
    model = make_reference(tmp_path / "model", CONFIG)
    rng = random.Random(4)
    prompts = [[rng.randrange(CONFIG.vocab_size) for _ in range(length)] for length in (97, 99, 101)]
    options = {"name": redis_names.deployment, "num_gpu_blocks_override": 24, "max_model_len": 256, "swap_space": 0.0}
    async with running(model, lambda: RedisBus(redis_url, names=redis_names), executors=2, **options) as system:
        core, names = system.scheduler.core, system.names
        await until(lambda: len(core.replicas) == 2)
        expected = (
            [await system.submit(prompt, max_tokens=COUNT, ignore_eos=True, **sampling)[1] for prompt in prompts]
            if sampling
            else reference_generate(model, prompts, COUNT)
        )
        await until(lambda: core.is_idle)
        asked = [system.submit(prompt, max_tokens=COUNT, ignore_eos=True, **sampling) for prompt in prompts]
        assert await asyncio.gather(*(answer for _, answer in asked)) == expected
        came = [[stream for _, stream in system.collector.came[request_id]] for request_id, _ in asked]
        ends = {(streams[0], streams[-1]) for streams in came}
        assert (names.results(FULL), names.results(FREE)) in ends
        assert core.replicas[FULL].counts.num_departures == core.num_preemptions > 0
        assert core.replicas[FREE].moves.num_pulled == core.replicas[FULL].moves.num_lent > 0
