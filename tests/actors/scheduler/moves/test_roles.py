"""Roles: long prompts are computed on prefill replicas, and go on elsewhere with blocks that are pulled."""

from __future__ import annotations

from typing import Any

import pytest

from pagebus.actors.scheduler.events import MOVED, ReplicaSuspended
from tests.actors.scheduler.moves.fake_pulls import FakePulls, Lenders
from tests.actors.scheduler.moves.splits import split_often
from tests.actors.scheduler.world import World, prompt, request

LONG = prompt(40, seed=5)
LEFT = 20


@pytest.fixture(autouse=True)
def short_prompts_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    split_often(monkeypatch, 24, 4)


class Split:
    """``num_prefill`` replicas of three; their names are in the order of their roles."""

    def __init__(self, num_prefill: int = 1, num_replicas: int = 2, **options: Any) -> None:
        config = {key: options.pop(key) for key in ("pipeline_depth", "itl_target_s") if key in options}
        self.world = World(num_prefill=num_prefill, **config)
        self.lenders: Lenders = {}
        self.options = {"num_blocks": 64, "max_num_seqs": 4, **options}
        for number in reversed(range(num_replicas)):  # roles go by names, not by who joins first
            self.join(number)

    def join(self, number: int, kind: str = "alike", **pulls: Any) -> None:
        pulled = FakePulls(**{"kind": kind, "lenders": self.lenders, **pulls})
        self.world.join(name=f"gpu-{number}", epoch=number + 1, pulls=pulled, **self.options)

    def computed(self, number: int) -> int:
        return self.world.executors[f"gpu-{number}"].num_computed

    def moved(self) -> list[str]:
        return [each.request_id for each in self.world.preempted if each.why == MOVED]

    def end(self) -> None:
        self.world.run()
        self.world.check_end()


@pytest.mark.parametrize(
    "options",
    [{}, {"windowed_pages": 2, "windowed_tokens": 6, "num_blocks": 160}, {"num_drafts": 3}, {"pipeline_depth": 3}],
)
def test_a_long_prompt_is_computed_by_one_and_decoded_by_the_other(options: dict[str, Any]) -> None:
    split = Split(**options)
    split.world.send(request("long", LONG, max_tokens=LEFT))
    split.end()
    assert split.moved() == ["long"]
    replicas = split.world.core.replicas
    assert replicas["gpu-1"].moves.num_pulled == replicas["gpu-0"].moves.num_lent >= 10
    assert [name for name, plan in split.world.plans for each in plan.new_sequences] == ["gpu-0", "gpu-1"]
    assert split.computed(0) <= len(LONG) + 2  # and decodes that were planned before it could leave


def test_a_short_prompt_is_computed_beside_decodes() -> None:
    split = Split()
    split.world.send(request("short", LONG[:20], max_tokens=LEFT))
    split.end()
    assert split.moved() == []
    assert split.computed(0) == 0


def test_so_is_the_end_of_a_long_one_that_is_cached() -> None:
    split = Split()
    split.world.send(request("first", LONG, max_tokens=LEFT))
    split.world.run()
    before = split.computed(0)
    split.world.send(request("again", [*LONG, 3, 2, 1], max_tokens=LEFT))
    split.end()
    assert split.computed(0) == before


def test_a_prompt_with_few_tokens_to_come_ends_where_it_was_computed() -> None:
    split = Split()
    split.world.send(request("scored", LONG, max_tokens=2))
    split.end()
    assert split.moved() == []
    assert split.computed(1) == 0


def test_a_prompt_that_only_the_other_role_can_hold_runs_there() -> None:
    split = Split(num_replicas=1, num_blocks=8)
    split.options["num_blocks"] = 64
    split.join(1)
    split.world.send(request("long", LONG, max_tokens=LEFT))
    split.end()
    assert split.computed(0) == 0


def test_sequences_stay_while_decode_replicas_have_no_room() -> None:
    """Four slots for eight sequences: the rest goes on where its prompt was computed, and moves once there is room."""
    split = Split(max_num_seqs=8, num_replicas=1)
    split.options["max_num_seqs"] = 4
    split.join(1)
    split.world.send(*(request(f"r{each}", prompt(40, seed=each), max_tokens=30 + each) for each in range(8)))
    for _ in range(30):
        split.world.step()
        assert len(split.world.core.planner.waiting) <= 8
    split.end()
    assert 4 <= len(split.moved()) <= 8


def test_prompts_are_admitted_while_others_are_on_their_way() -> None:
    """Whose last step is in flight on a prefill replica does not keep others from its next step."""
    split = Split(pipeline_depth=2, budget=40)
    split.world.send(*(request(f"r{each}", prompt(40, seed=each), max_tokens=LEFT) for each in range(3)))
    assert [len(plan.new_sequences) for name, plan in split.world.plans if name == "gpu-0"] == [1, 1]
    split.end()
    assert len(split.moved()) == 3


def test_who_is_handed_over_passes_a_replica_that_has_prompts_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode replica takes no more prompts, but a stream."""
    split = Split()
    split.world.send(request("long", LONG, max_tokens=LEFT))
    replica = split.world.core.replicas["gpu-1"]
    monkeypatch.setattr(replica, "is_open", lambda *_: False)
    split.world.send(request("short", LONG[:8], max_tokens=4))
    split.world.run()
    assert split.world.over == {"long"}
    assert split.moved() == ["long"]
    assert replica.moves.num_pulled > 0
    monkeypatch.undo()
    split.world.core.planner.touch_all()
    split.world.send(request("other", LONG[:8], max_tokens=4))
    split.end()


@pytest.mark.parametrize("gone", ["gpu-0", "gpu-1"])
@pytest.mark.parametrize("how", ["kill", "drain"])
def test_without_one_role_the_other_does_both(gone: str, how: str) -> None:
    split = Split()
    split.world.send(request("long", LONG, max_tokens=LEFT))
    split.world.step()
    if how == "kill":
        split.world.kill(gone)
    else:
        split.world.send(ReplicaSuspended(gone, drains=True))
    split.world.send(request("later", prompt(40, seed=8), max_tokens=LEFT))
    split.end()


def test_replicas_that_cannot_lend_do_both() -> None:
    split = Split(num_replicas=1)
    split.join(1, kind="another")
    split.world.send(request("long", LONG, max_tokens=LEFT))
    split.end()
    assert split.moved() == []
    assert split.computed(0) == 0


def test_failed_pulls_cost_speed_only_and_end_the_roles() -> None:
    split = Split(num_replicas=1)
    split.join(1, fails=1)
    for each in range(5):
        split.world.send(request(f"r{each}", prompt(40, seed=each), max_tokens=LEFT))
        split.world.run()
    split.end()
    assert len(split.moved()) == 3


def test_beams_do_not_move() -> None:
    split = Split()
    split.world.send(request("beams", LONG, max_tokens=8, beam_width=2, n=2))
    split.end()
    assert split.moved() == []
    assert split.computed(0) == 0


def test_a_prompt_that_is_scored_moves_once_its_scores_have_come() -> None:
    """Its blocks in a cache are of no use before."""
    split = Split(pipeline_depth=1)
    split.world.send(request("scored", prompt(40, seed=6), max_tokens=LEFT, prompt_logprobs=1))
    assert split.moved() == []
    split.end()
    assert split.moved() == ["scored"]
    assert split.computed(0) <= 40 + 2


def test_all_choices_of_a_request_move() -> None:
    split = Split()
    split.world.send(request("four", LONG, max_tokens=LEFT, n=4))
    split.end()
    assert split.computed(0) <= len(LONG)


def test_one_of_two_prefill_replicas_that_has_less_to_do_computes() -> None:
    split = Split(num_prefill=2, num_replicas=3)
    split.world.send(*(request(f"r{each}", prompt(40, seed=each), max_tokens=LEFT) for each in range(2)))
    split.end()
    assert split.computed(0) == split.computed(1) == 40


@pytest.mark.parametrize(("itl_target_s", "entered"), [(None, ["gpu-0", "gpu-0"]), (1.0, ["gpu-0", "gpu-1"])])
def test_where_streams_keep_a_target_decode_replicas_compute_what_others_have_no_time_for(
    itl_target_s: float | None, entered: list[str]
) -> None:
    """The second prompt waits for the first, unless a pacer lets streams go on beside it."""
    split = Split(itl_target_s=itl_target_s)
    split.world.send(*(request(f"r{each}", prompt(40, seed=each), max_tokens=LEFT) for each in range(2)))
    assert sorted(name for name, plan in split.world.plans for _ in plan.new_sequences) == entered
    split.end()


def test_an_operator_sees_the_roles() -> None:
    split = Split(num_prefill=2, num_replicas=3)
    planner = split.world.core.planner
    found = {name: planner.roles.role(replica) for name, replica in planner.replicas.items()}
    assert found == {"gpu-0": "prefill", "gpu-1": "prefill", "gpu-2": "decode"}
    split.world.kill("gpu-2")
    found = {name: planner.roles.role(replica) for name, replica in planner.replicas.items()}
    assert found == {"gpu-0": "", "gpu-1": ""}
