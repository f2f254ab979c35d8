"""Prompts of encoders: each in one step, from its first token on, however many wait."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagebus.bus.messages import TokenizedRequest
from pagebus.bus.messages.segments import with_segments
from tests.actors.scheduler.world import World, prompt, request


def pooled(name: str, ids: list[int], **sampling: Any) -> TokenizedRequest:
    return request(name, ids, max_tokens=1, ignore_eos=True, pooling="cls", in_one_step=True, **sampling)


def scheduled(world: World) -> list[int]:
    """Tokens of every row of every step."""
    return [count for _, plan in world.plans for count in plan.num_scheduled.tolist()]


@pytest.mark.parametrize("seed", range(4))
def test_each_prompt_is_computed_whole(seed: int) -> None:
    """In any order, of any lengths up to the budget: in no step is a part of one, and none begins behind a prefix that
    another has computed."""
    rng = random.Random(seed)
    world = World()
    world.join(budget=32, num_blocks=200, max_num_seqs=8)
    lengths = [rng.choice((1, 5, 17, 31, 32)) for _ in range(40)]
    world.send(*(pooled(f"r{index}", prompt(length)) for index, length in enumerate(lengths)))
    world.run()

    assert sorted(scheduled(world)) == sorted(lengths)
    assert all(plan.num_scheduled.sum() <= 32 for _, plan in world.plans)
    assert all(new.num_computed_tokens == 0 for _, plan in world.plans for new in plan.new_sequences)
    assert {(new.pooled_from, new.pooled_until) for _, plan in world.plans for new in plan.new_sequences} == {(0, 1)}
    world.check_end()


def test_few_blocks() -> None:
    """What has no blocks for all of its tokens waits for them, and does not run in part."""
    world = World()
    world.join(budget=64, num_blocks=8, max_num_seqs=8)
    world.send(*(pooled(f"r{index}", prompt(30, index)) for index in range(6)))
    world.run()
    assert scheduled(world) == [30] * 6
    world.check_end()


def test_beside_an_itl_target() -> None:
    """A prompt of one token counts as a decode; nothing is cut beside it."""
    world = World(itl_target_s=0.001)
    world.join(budget=32, num_blocks=200)
    world.send(*(pooled(f"r{index}", prompt(length, index)) for index, length in enumerate((1, 30, 1, 28, 1, 1))))
    world.run()
    assert sorted(scheduled(world)) == [1, 1, 1, 1, 28, 30]
    world.check_end()


def test_longer_than_a_step() -> None:
    """Is refused, for it would wait for ever."""
    world = World()
    world.join(budget=16, num_blocks=200)
    world.send(pooled("a", prompt(17)), request("b", prompt(17), max_tokens=2))
    world.run()
    assert set(world.failed) == {"a"}
    assert "computes in one step" in world.failed["a"].message


def test_segments_are_no_tokens() -> None:
    """They are in the ids of prompts of encoders alone."""
    import numpy as np

    from pagebus.actors.scheduler.core.validation import of_message

    message = pooled("a", [3, 4])
    ids = with_segments(np.array([3, 4], np.int32), np.array([0, 1], np.int32))
    from msgspec.structs import replace

    segmented = replace(message, prompt_token_ids=ids)
    assert of_message(segmented, 10) is None
    plain = replace(segmented, sampling=replace(segmented.sampling, in_one_step=False))
    assert of_message(plain, 10) is not None
    assert of_message(segmented, 4) is not None
