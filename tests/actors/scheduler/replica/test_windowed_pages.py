"""Models in which only some layers have a window: a block has pages of both kinds, those of these layers are given back
behind the window, and everything else stays right."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pagebus.actors.model.block_hash import hash_blocks
from pagebus.actors.scheduler.kv.prefix_index import page_keys
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

PAGES = 2
MOST_HELD = (WINDOW + BUDGET + SIZE - 3) // SIZE + 1
"""Blocks in which a step's tokens and what they see lie."""
SEEN_FROM = (64 - WINDOW + 1) // SIZE


def grouped(*, pages: int = PAGES, config: dict[str, Any] | None = None, **options: Any) -> tuple[World, FakeExecutor]:
    """A world in which a block of four tokens has a page of layers that read everything, and two of layers that look
    back on ten tokens; a step has eight."""
    world = World(**(config or {}))
    sizes = {"windowed_pages": pages, "windowed_tokens": WINDOW, "num_blocks": 200, "max_model_len": 512}
    return world, world.join(**{"budget": BUDGET, **sizes, **options})


def most_side_by_side(world: World, executor: FakeExecutor) -> int:
    together = 0
    while executor.queue:
        together = max(together, len(replica(world).slots))
        world.step()
    return together


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_only_windowed_pages_are_given_back(depth: int) -> None:
    """Through a prompt in chunks and a long output, whatever is in flight."""
    world, executor = grouped(config={"pipeline_depth": depth})
    world.send(request("a", prompt(60), max_tokens=60))
    most = 0
    while executor.queue:
        most = max(most, held(world))
        world.step()
    world.check_end()
    blocks = -(-(60 + 59) // SIZE)
    assert blocks + PAGES * (WINDOW // SIZE) <= most <= blocks + PAGES * (MOST_HELD + 1)
    assert replica(world).counts.num_given_back >= PAGES * ((60 + 59 - WINDOW) // SIZE - 1)


def test_more_sequences_fit() -> None:
    """Of 100 tokens: in 100 pages one whose layers keep everything, and two with their windows."""
    counts = []
    for window in (WINDOW, 512):
        world, executor = grouped(num_blocks=100, windowed_tokens=window)
        world.send(*(request(name, prompt(90, seed), max_tokens=10) for seed, name in enumerate("abcd")))
        counts.append(most_side_by_side(world, executor))
        world.check_end()
    alone = 25 + PAGES * MOST_HELD
    assert counts == [100 // alone, 100 // (25 * (1 + PAGES))] == [2, 1]


def test_a_long_request_runs_in_a_small_pool() -> None:
    """In as few pages as hold one window and all of the other kind; with fewer it is refused."""
    world, _ = grouped(num_blocks=30 + PAGES * 4)
    run_alone(world, request("a", prompt(80), max_tokens=40))
    world.check_end()
    assert world.failed == {}
    assert replica(world).counts.num_preemptions == 0

    world, _ = grouped(num_blocks=29 + PAGES * 4)
    run_alone(world, request("a", prompt(80), max_tokens=40))
    assert world.failed["a"].status == 400


# -- the prefix cache -------------------------------------------------------------------------------------------------
def test_a_hit_needs_all_of_one_kind_and_the_last_window_of_the_other() -> None:
    """Windowed pages of the beginning are forgotten; the whole prompt is found all the same."""
    world, executor = grouped()
    head = prompt(64)
    run_alone(world, request("a", head, max_tokens=1))
    forget(world, [key for each in hash_blocks(head, SIZE)[:SEEN_FROM] for key in page_keys(each, PAGES)])
    run_alone(world, request("b", [*head, 1, 2, 3], max_tokens=8))

    world.check_end()
    (new,) = entered(world, "b")
    assert (new.num_computed_tokens, new.first_block, new.first_windowed) == (64, 0, SEEN_FROM)
    assert executor.num_computed == 64 + 3 + 7
    assert replica(world).counts.prefix_hits == 64


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("gone", [14, 15])
def test_a_missing_page_shortens_a_hit(page: int, gone: int) -> None:
    """Of whichever kind: the prefix in front of it is found, as far as its own last window is there."""
    world, _ = grouped()
    head = prompt(64)
    run_alone(world, request("a", head, max_tokens=1))
    block_hash = hash_blocks(head, SIZE)[gone]
    forget(world, [[block_hash, *page_keys(block_hash, PAGES)][page]])
    run_alone(world, request("b", [*head, 1, 2, 3], max_tokens=1))
    (new,) = entered(world, "b")
    assert new.num_computed_tokens == gone * SIZE
    assert new.first_windowed <= (gone * SIZE - WINDOW + 1) // SIZE
    world.check_end()


def test_no_windowed_pages_are_no_hit() -> None:
    """All of the other kind are cached."""
    world, _ = grouped()
    head = prompt(64)
    run_alone(world, request("a", head, max_tokens=1))
    forget(world, [key for each in hash_blocks(head, SIZE) for key in page_keys(each, PAGES)])
    run_alone(world, request("b", [*head, 1, 2, 3], max_tokens=1))
    assert [new.num_computed_tokens for new in entered(world, "b")] == [0]


def forget(world: World, keys: list[bytes]) -> None:
    """As if the pages had been given to others."""
    index = replica(world).index
    for key in keys:
        page = index.find(key)
        assert page is not None
        index.forget([page])


# -- preemption and forks ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_come_back(mode: str, caching: bool) -> None:
    """A swap copies the pages that are held; recomputing begins anew."""
    config = {"preemption_mode": mode, "enable_prefix_caching": caching}
    world, executor = grouped(config=config, num_host_blocks=100)
    sequence, before = preempt_at(world, 14)
    assert (before.first_block, before.first_windowed) == (0, before.first_seen)
    assert (sequence.pages, sequence.first_windowed) == ([], 0)
    resume(world)
    if mode == "swap":
        assert executor.num_copied[0] == before.num_pages
        assert caching or executor.num_copied[1] == before.num_pages
        assert executor.num_computed == 60 + 29
        assert entered(world, "a")[1].first_windowed == before.first_seen


def test_what_a_swap_copied_can_be_found() -> None:
    """Each page on the host under its own key, whatever the device forgets."""
    world, executor = grouped(config={"preemption_mode": "swap"}, num_host_blocks=100)
    _, before = preempt_at(world, 10)
    replica(world).index.clear()
    index = replica(world).host_tier.pool.index
    kept = hash_blocks(prompt(60), SIZE)[before.first_windowed :]
    assert all(index.find(key) is not None for each in kept for key in page_keys(each, PAGES))
    resume(world)
    assert executor.num_computed == 60 + 29


def test_choices_share_the_end_of_the_prompt() -> None:
    """Forks take all blocks, of the windowed pages those of the last window, and copy each page of the partial one."""
    world, executor = grouped(config={"enable_prefix_caching": False})
    run_alone(world, request("a", prompt(50), max_tokens=20, n=3))
    world.check_end()
    first = (49 - WINDOW + 1) // SIZE
    assert executor.num_computed == 50 + 2 + 3 * 19
    assert [(new.first_block, new.first_windowed) for new in entered(world, "a")] == [(0, 0), (0, first), (0, first)]
    assert [len(plan.copy_sources) for plan in executor.plans if len(plan.copy_sources)] == [2 * (1 + PAGES)]


def test_beams_keep_all_their_pages() -> None:
    """They may fork from any place of their past, and are refused where that does not fit."""
    world, executor = grouped()
    run_alone(world, request("a", prompt(40), max_tokens=20, beam_width=3))
    world.check_end()
    assert replica(world).counts.num_given_back == 0
    assert any(len(plan.cut_slots) for plan in executor.plans)

    world, _ = grouped(num_blocks=(10 + 2 * 10) * (1 + PAGES) - 1)
    run_alone(world, request("beams", prompt(40), max_tokens=41, beam_width=2))
    assert list(world.failed) == ["beams"]


def test_the_host_tier_keeps_pages_of_both_kinds() -> None:
    """Cached pages that the device forgets are found again on the host."""
    config = {"preemption_mode": "swap"}
    world, executor = grouped(config=config, num_blocks=70, num_host_blocks=300)
    head = prompt(64)
    others = [request(name, prompt(64, seed), max_tokens=1) for seed, name in enumerate("bcde", 1)]
    run_alone(world, request("a", head, max_tokens=1), *others, request("f", [*head, 1, 2], max_tokens=8))
    world.check_end()
    (new,) = entered(world, "f")
    assert new.num_computed_tokens == 64
    assert executor.num_copied[1] > 0
    assert world.failed == {}


def test_models_without_such_pages_get_the_messages_of_before() -> None:
    """Nothing of them is in a plan."""
    world, executor = grouped(pages=0, windowed_tokens=0)
    run_alone(world, request("a", prompt(30), max_tokens=20, n=2), request("b", prompt(9), max_tokens=5, beam_width=2))
    assert not any(len(plan.new_windowed) or len(plan.appended_windowed) for plan in executor.plans)
    assert not any(new.first_windowed for plan in executor.plans for new in plan.new_sequences)


@pytest.mark.parametrize("window", [5, 10, 13])
def test_accepted_drafts_leave_pages_behind_the_window(window: int) -> None:
    """A sequence that fills the pool alone gets them before it needs more."""
    world, num_tokens = World(), 76
    num_blocks = -(-num_tokens // SIZE) + -(-window // SIZE) + 1
    world.join(num_drafts=7, num_blocks=num_blocks, windowed_pages=1, windowed_tokens=window)
    world.send(request("a", prompt(10, 1), max_tokens=num_tokens + 1 - 10))
    world.run()
    world.check_end()


def test_who_waits_for_copies_goes_on_if_others_find_no_blocks() -> None:
    """Two jobs give way to a third request. The first comes back with slow copies out of the host tier and takes the
    last blocks; the second needs one, and may not preempt it. It had to wait for the first, which waited for a plan."""
    world, _ = grouped(
        pages=1, config={"pipeline_depth": 1, "priority_aging_s": 1e-4}, windowed_tokens=24, num_blocks=26, budget=16,
        max_num_seqs=2, num_host_blocks=20, copy_lag=3, copy_tokens=0.1,
    )  # fmt: skip
    first = prompt(28)
    jobs = request("first", first, max_tokens=3), request("second", [*first[:15], *[0] * 4], max_tokens=3)
    world.send(*(replace(each, is_job=True) for each in jobs), request("third", [5, *[0] * 17], max_tokens=15))
    world.run()
    world.check_end()
    assert replica(world).counts.num_swaps


def test_who_waits_for_copies_keeps_the_pages_that_they_come_into() -> None:
    """Drafts have moved its window on, and another one of the step finds no blocks. A page given back then would be
    written by the copy after somebody else has it."""
    world, _ = grouped(
        pages=1, config={"pipeline_depth": 2, "priority_aging_s": 1e-4}, windowed_tokens=1, num_blocks=11, budget=64,
        max_num_seqs=2, num_host_blocks=8, copy_lag=1, copy_tokens=0.1, num_drafts=3,
    )  # fmt: skip
    sizes = (8, 1, True), (7, 6, False), (23, 18, False), (9, 12, True)
    world.send(
        *(
            replace(request(f"r{number}", prompt(size), max_tokens=most), is_job=is_job)
            for number, (size, most, is_job) in enumerate(sizes)
        )
    )
    world.run()
    world.check_end()
