"""Models whose layers all have a window: blocks behind it are given back, and everything else stays right."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.model.block_hash import hash_blocks
from tests.actors.scheduler.fake_executor import FakeExecutor
from tests.actors.scheduler.replica.windows import (
    BUDGET,
    SIZE,
    WINDOW,
    entered,
    held,
    preempt_at,
    replica,
    resume,
    run_alone,
)
from tests.actors.scheduler.world import World, prompt, request


def windowed(
    *, window: int = WINDOW, config: dict[str, Any] | None = None, **options: Any
) -> tuple[World, FakeExecutor]:
    """A world whose model looks back on ten tokens, in blocks of four; a step has eight."""
    world = World(window=window, **(config or {}))
    return world, world.join(**{"budget": BUDGET, "window": window, "max_model_len": 512, **options})


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_more_is_held_than_window_and_chunk(depth: int) -> None:
    """Through a prompt in chunks and a long output, whatever is in flight."""
    world, executor = windowed(config={"pipeline_depth": depth})
    world.send(request("a", prompt(60), max_tokens=60))
    most = 0
    while executor.queue:
        most = max(most, held(world))
        world.step()

    world.check_end()
    assert most <= (WINDOW - 1 + BUDGET) // SIZE + 2
    assert replica(world).counts.num_given_back >= (60 + 59 - WINDOW) // SIZE - 1


def test_without_a_window_everything_is_held() -> None:
    """The same in blocks for all tokens."""
    world, executor = windowed(window=0)
    world.send(request("a", prompt(60), max_tokens=60))
    most = 0
    while executor.queue:
        most = max(most, held(world))
        world.step()
    assert most == -(-(60 + 59) // SIZE)
    assert replica(world).counts.num_given_back == 0


def test_a_long_request_runs_in_a_small_pool() -> None:
    """In blocks for a fifth of its tokens, without a preemption."""
    world, _ = windowed(num_blocks=6)
    run_alone(world, request("a", prompt(80), max_tokens=40))
    world.check_end()
    assert world.failed == {}
    assert replica(world).counts.num_preemptions == 0


def test_long_prompts_are_admitted_side_by_side() -> None:
    """Admission counts what they can hold, not what they are long."""
    world, executor = windowed(num_blocks=14)
    world.send(request("a", prompt(80), max_tokens=4), request("b", prompt(80, 1), max_tokens=4))
    together = 0
    while executor.queue:
        together = max(together, len(replica(world).slots))
        world.step()
    world.check_end()
    assert together == 2
    assert replica(world).counts.num_preemptions == 0


def test_what_cannot_hold_a_window_is_refused() -> None:
    """Unless the request is shorter than that."""
    world, _ = windowed(num_blocks=3)
    run_alone(world, request("long", prompt(40), max_tokens=4), request("short", prompt(8), max_tokens=4))
    assert list(world.failed) == ["long"]
    assert world.failed["long"].status == 400
    assert world.over == {"long", "short"}


# -- the prefix cache -------------------------------------------------------------------------------------------------
def test_a_hit_needs_the_last_window_only() -> None:
    """The beginning of a prompt has been overwritten, its end has not: all of it is found, with a hole in front."""
    world, executor = windowed(num_blocks=10)
    head = prompt(64)
    run_alone(world, request("a", head, max_tokens=1), request("b", [*head, 1, 2, 3], max_tokens=8))

    world.check_end()
    (new,) = entered(world, "b")
    assert new.num_computed_tokens == 64
    assert new.first_block == (64 - WINDOW + 1) // SIZE
    assert new.num_blocks >= 16 - new.first_block
    assert executor.num_computed == 64 + 3 + 7


def test_an_older_end_is_found_where_a_newer_one_is_gone() -> None:
    """Of two prompts with a common beginning the second finds that, though none of the rest."""
    world, _ = windowed(num_blocks=40)
    head = prompt(32)
    run_alone(
        world, request("a", [*head, *prompt(20, 1)], max_tokens=1), request("b", [*head, *prompt(20, 2)], max_tokens=1)
    )
    world.check_end()
    (new,) = entered(world, "b")
    assert new.num_computed_tokens == 32
    assert new.first_block == (32 - WINDOW + 1) // SIZE


def test_a_hole_in_the_window_is_no_hit() -> None:
    """One block of the last window has been overwritten: a shorter prefix is found, or none."""
    world, _ = windowed(num_blocks=40)
    head = prompt(64)
    run_alone(world, request("a", head, max_tokens=1))
    index = replica(world).index
    gone = index.find(hash_blocks(head, SIZE)[14])
    assert gone is not None
    index.forget([gone])
    run_alone(world, request("b", [*head, 1, 2, 3], max_tokens=1))
    (new,) = entered(world, "b")
    assert new.num_computed_tokens == 14 * SIZE


def test_the_replica_with_the_last_window_is_found() -> None:
    """Though it has forgotten how the prompt began, and another one has more room."""
    world, _ = windowed(num_blocks=14)
    head = prompt(64)
    run_alone(world, request("a", head, max_tokens=1))
    assert replica(world).index.find(hash_blocks(head, SIZE)[0]) is None, "the beginning is to be gone"
    world.send(request("busy", prompt(17, 3), max_tokens=200))
    world.join(name="gpu-1", epoch=3, budget=BUDGET, window=WINDOW, num_blocks=30, max_model_len=512)
    world.send(request("b", [*head, 1, 2, 3], max_tokens=1))
    world.run()
    world.check_end()
    assert [name for name, plan in world.plans for new in plan.new_sequences if new.num_tokens == 67] == ["gpu-0"]


# -- preemption and forks ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_come_back(mode: str, caching: bool) -> None:
    """A swap copies what is held, and nothing behind the window; recomputing begins anew."""
    config = {"preemption_mode": mode, "enable_prefix_caching": caching}
    world, executor = windowed(config=config, num_host_blocks=40)
    sequence, before = preempt_at(world, 14)
    assert before.first_block == before.first_seen
    assert (sequence.blocks, sequence.first_block) == ([], 0)
    resume(world)
    if mode == "swap":
        assert executor.num_copied[0] == before.num_pages
        assert caching or executor.num_copied[1] == before.num_pages
        assert executor.num_computed == 60 + 29
        assert entered(world, "a")[1].first_block == before.first_seen


def test_choices_share_the_end_of_the_prompt() -> None:
    """Forks take the blocks of the last window, and copy the partial one."""
    world, executor = windowed(config={"enable_prefix_caching": False})
    run_alone(world, request("a", prompt(50), max_tokens=20, n=3))
    world.check_end()
    assert executor.num_computed == 50 + 2 + 3 * 19
    assert [new.first_block for new in entered(world, "a")] == [0, (49 - WINDOW + 1) // SIZE, (49 - WINDOW + 1) // SIZE]


def test_a_choice_that_comes_late_computes_the_prompt_again() -> None:
    """The first has long given its end back, and nothing is cached."""
    world, executor = windowed(config={"enable_prefix_caching": False}, max_num_seqs=1)
    run_alone(world, request("a", prompt(50), max_tokens=20, n=2))
    world.check_end()
    assert executor.num_computed == 2 * (50 + 19)


def test_beams_keep_all_their_blocks() -> None:
    """They may fork from any place of their past."""
    world, _ = windowed(num_blocks=60)
    run_alone(world, request("a", prompt(40), max_tokens=20, beam_width=3))
    world.check_end()
    assert replica(world).counts.num_given_back == 0
    assert [new.first_block for new in entered(world, "a")] == [0] * len(entered(world, "a"))


def test_beams_count_all_their_blocks() -> None:
    """A search that could not grow to its end is refused, and one without beams is not."""
    world, _ = windowed(num_blocks=14)
    run_alone(
        world,
        request("beams", prompt(40), max_tokens=40, beam_width=2), request("one", prompt(40), max_tokens=40),
    )  # fmt: skip
    assert list(world.failed) == ["beams"]


def test_blocks_are_given_on_by_the_very_next_plan() -> None:
    """With the plan that reads them last still in flight."""
    world, executor = windowed(num_blocks=6)
    world.send(request("a", prompt(80), max_tokens=1))
    tables = []
    while executor.queue:
        in_flight = list(executor.queue)
        tables += [plan.appended_blocks.tolist() for plan in in_flight[1:] if in_flight[0].new_sequences == ()]
        world.step()
    given = [block for table in tables for block in table]
    assert len(given) > 6
    assert set(given) <= set(range(6))
