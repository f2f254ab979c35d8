"""Chunk by chunk: a decode replica pulls what is computed of a long prompt while the rest of it is."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.scheduler.core import planner
from pagebus.actors.scheduler.fleet import roles
from pagebus.bus.messages import AbortRequest
from tests.actors.scheduler.moves.splits import split_often
from tests.actors.scheduler.moves.test_roles import LEFT, Split
from tests.actors.scheduler.world import prompt, request

CHUNK, BLOCK = 16, 4
LONG = prompt(80, seed=5)


@pytest.fixture(autouse=True)
def short_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    split_often(monkeypatch, 24, 4)


def chunked(num_replicas: int = 2, **options: Any) -> Split:
    """A prefill replica that computes a long prompt in five plans."""
    return Split(num_replicas=num_replicas, budget=CHUNK, **options)


def pulled(split: Split, name: str = "gpu-1") -> list[int]:
    """Blocks of each pull that a replica's plans have, and 0 where its first sequence enters."""
    found = []
    for each, plan in split.world.plans:
        if each == name:
            found += [pull.num_blocks for pull in plan.pulls] + [0] * len(plan.new_sequences)
    return found


@pytest.mark.parametrize("options", [{}, {"pipeline_depth": 3}, {"num_drafts": 3}])
def test_only_the_last_chunk_is_left_at_the_hand_over(options: dict[str, Any]) -> None:
    """Each is pulled once."""
    split = chunked(**options)
    split.world.send(request("long", LONG, max_tokens=LEFT))
    split.end()
    assert split.moved() == ["long"]
    assert pulled(split) == [CHUNK // BLOCK] * 5 + [0]
    moves = split.world.core.replicas["gpu-1"].moves
    assert moves.num_pulled_tokens == moves.num_pulled * BLOCK == len(LONG)


def test_the_first_chunks_are_there_before_the_prompt_is_computed() -> None:
    """And others wait for nothing: the decode replica's plans have no rows of the sequence yet."""
    split = chunked()
    split.world.send(request("long", LONG, max_tokens=LEFT))
    while split.computed(0) < len(LONG) - CHUNK:
        split.world.step("gpu-0")
        if split.world.executors["gpu-1"].queue:
            split.world.step("gpu-1")
        if split.world.executors["gpu-1"].pulls.orders:
            split.world.pull("gpu-1")
    assert split.world.core.replicas["gpu-1"].moves.num_pulled >= 2 * CHUNK // BLOCK
    assert 0 not in pulled(split)
    split.end()
    assert split.moved() == ["long"]


def test_all_chunks_go_to_one_replica() -> None:
    """Though two decode replicas have room."""
    split = chunked(num_replicas=3)
    split.world.send(request("long", LONG, max_tokens=LEFT))
    split.end()
    ahead = [pulled(split, name) for name in ("gpu-1", "gpu-2")]
    assert [each[:4] == [CHUNK // BLOCK] * 4 for each in ahead].count(True) == 1


@pytest.mark.parametrize("what", ["abort", "target", "lender"])
def test_whoever_ends_in_the_middle_costs_speed_only(what: str) -> None:
    """All blocks of the pools are whole, and the tokens are right."""
    split = chunked(num_replicas=3)
    split.world.send(request("long", LONG, max_tokens=LEFT))
    while split.computed(0) < 2 * CHUNK:
        split.world.step("gpu-0")
    split.world.core.check_integrity()
    assert len(split.world.core.planner.pulls)
    if what == "abort":
        split.world.send(AbortRequest(request_id="long"))
    else:
        split.world.kill("gpu-0" if what == "lender" else "gpu-1")
    split.world.core.check_integrity()
    split.end()
    assert not len(split.world.core.planner.pulls)


def test_a_pull_that_fails_is_made_again_at_the_hand_over() -> None:
    """Every second one does. After three in a row nothing would be pulled."""
    split = Split(budget=CHUNK, num_replicas=0)
    split.join(0)
    split.join(1, fails=2)
    split.world.send(request("long", LONG, max_tokens=LEFT))
    split.end()
    moves = split.world.core.replicas["gpu-1"].moves
    assert moves.num_failed > 0
    assert moves.num_pulled > 0


def test_where_it_does_not_pay_nothing_is_pulled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of beams, which do not move."""
    sent: list[str] = []
    before = planner.send_ahead

    def noted(lender: Any, fleet: Any, pulls: Any, roles: Any) -> None:
        count = len(pulls)
        before(lender, fleet, pulls, roles)
        sent.extend([lender.name] * (len(pulls) - count))

    monkeypatch.setattr(planner, "send_ahead", noted)
    split = chunked()
    split.world.send(request("beams", LONG, beam_width=2, max_tokens=LEFT))
    split.world.send(request("short", LONG[:20], max_tokens=LEFT))
    split.end()
    assert sent == []


def moved_after_one(budget: int, bytes_per_s: float) -> list[str]:
    """Which of two long prompts leave the replica that computes them, the second once the link's rate is known."""
    split = Split(budget=budget, num_replicas=0)
    split.join(0)
    split.join(1, bytes_per_s=bytes_per_s)
    for each in range(2):
        split.world.send(request(f"r{each}", prompt(len(LONG), seed=each), max_tokens=LEFT))
        split.world.run()
    split.end()
    return split.moved()


@pytest.mark.parametrize(("budget", "moved"), [(CHUNK, ["r0", "r1"]), (len(LONG), ["r0"])])
def test_whether_a_prompt_is_split_is_decided_by_what_is_waited_for(budget: int, moved: list[str]) -> None:
    """All of its blocks take a fifth of the time in which it is computed, those of one of five steps a 25th."""
    assert moved_after_one(budget, 1250.0) == moved


def test_a_link_that_cannot_keep_up_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the last step's blocks alone would come soon enough: those before it would not be there yet."""
    monkeypatch.setattr(roles, "MOST_COST", 0.3)
    assert moved_after_one(CHUNK, 200.0) == ["r0"]
