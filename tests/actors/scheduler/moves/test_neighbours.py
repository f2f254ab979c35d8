"""Preemption to a neighbour: a sequence without blocks goes on where there is room, if that is the quickest way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagebus.actors.scheduler.events import MOVED, PREEMPTED
from pagebus.bus.messages import AbortRequest
from tests.actors.scheduler.moves.fake_pulls import FakePulls
from tests.actors.scheduler.world import World, prompt, request

TIGHT = 24


class Tight:
    """A replica on which three sequences that have begun do not end together, and another that has room."""

    def __init__(self, *, mode: str = "auto", roomy: int = 60, **options: Any) -> None:
        self.world = World(preemption_mode=mode)
        self.lenders: dict[str, np.ndarray] = {}
        self.options = {"num_blocks": TIGHT, "max_num_seqs": 4, "copy_tokens": 3.0, **options}
        self.join("gpu-0", 1)
        self.roomy = {**self.options, "num_blocks": roomy}

    def begin(self, *messages: Any) -> None:
        self.world.send(*messages)
        self.world.step()
        self.join("gpu-1", 2, **self.roomy)

    def join(self, name: str, epoch: int, kind: str = "alike", fails: int = 0, **options: Any) -> None:
        pulled = FakePulls(kind=kind, fails=fails, lenders=self.lenders)
        self.world.join(name=name, epoch=epoch, pulls=pulled, **{**self.options, **options})

    def step_until_preempted(self) -> None:
        while not self.world.preempted:
            self.world.step("gpu-0")

    def end(self) -> None:
        self.world.run()
        self.world.check_end()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Preemptions on the tight one: by swap, by computing again, and to the other."""
        replica = self.world.core.replicas["gpu-0"]
        return replica.counts.num_swaps, replica.counts.num_recomputes, replica.counts.num_departures

    @property
    def why(self) -> list[str]:
        return [each.why for each in self.world.preempted]


def three() -> tuple[Any, ...]:
    return tuple(request(name, prompt(24, seed=each), max_tokens=16) for each, name in enumerate("abc"))


@pytest.mark.parametrize("options", [{}, {"num_drafts": 3}, {"num_host_blocks": 60}])
def test_who_has_no_block_goes_on_where_there_is_room(options: dict[str, Any]) -> None:
    """Its blocks come after it, so few tokens are computed again. It counts as preempted, and is told as moved."""
    tight = Tight(**options)
    tight.begin(*three())
    tight.end()
    assert tight.counts == (0, 0, 1)
    assert tight.why == [MOVED]
    assert tight.world.core.num_preemptions == 1
    assert tight.world.core.replicas["gpu-1"].moves.num_pulled > 0
    assert tight.world.executors["gpu-1"].num_computed < 30


def test_the_last_blocks_are_left_to_those_who_stay() -> None:
    """They would preempt one more otherwise, until the pull is over."""
    tight = Tight()
    tight.begin(*three())
    tight.step_until_preempted()
    while not (plans := [plan for _, plan in tight.world.plans if plan.pulls]):
        tight.world.step("gpu-0")
    assert len(plans[0].pull_blocks) < 28 // 4
    assert tight.world.core.replicas["gpu-0"].pool.num_free > 0
    tight.end()
    assert tight.counts == (0, 0, 1)


@pytest.mark.parametrize(
    ("mode", "options", "counts"),
    [
        ("swap", {"num_host_blocks": 60}, (1, 0, 0)),
        ("recompute", {"num_host_blocks": 60}, (0, 1, 0)),
        ("auto", {"num_host_blocks": 60, "copy_tokens": 0.01}, (1, 0, 0)),
        ("auto", {"windowed_pages": 1, "windowed_tokens": 8, "num_blocks": 34}, (0, 1, 0)),
    ],
)
def test_the_host_is_the_quicker_way_or_the_only_one(
    mode: str, options: dict[str, Any], counts: tuple[int, int, int]
) -> None:
    tight = Tight(mode=mode, **options)
    tight.begin(*three())
    tight.step_until_preempted()
    assert tight.counts == counts
    assert tight.why == [PREEMPTED]
    tight.end()


@pytest.mark.parametrize("other", [{"kind": "another"}, {"num_blocks": 8}, {"max_num_seqs": 1}])
def test_nobody_goes_where_no_room_is(other: dict[str, Any]) -> None:
    """Or where nothing can be pulled to. A sequence that begins there takes its only slot."""
    tight = Tight()
    tight.roomy |= other
    tight.begin(*three())
    tight.world.send(request("there", prompt(4, seed=9), max_tokens=24))
    tight.step_until_preempted()
    assert tight.counts == (0, 1, 0)
    tight.end()


def test_a_slow_link_is_not_taken() -> None:
    tight = Tight(num_host_blocks=60)
    tight.begin(*three())
    planner = tight.world.core.planner
    link = planner.pulls.link(planner.replicas["gpu-0"], planner.replicas["gpu-1"])
    link.ended(1, there=True, bytes_per_s=1.0)
    tight.step_until_preempted()
    assert tight.counts[2] == 0
    tight.end()


def test_a_failed_pull_costs_speed_only() -> None:
    tight = Tight()
    tight.roomy["fails"] = 1
    tight.begin(*three())
    tight.end()
    assert tight.counts == (0, 0, 1)
    assert tight.world.core.replicas["gpu-1"].moves.num_failed > 0


def test_beams_go_together() -> None:
    tight = Tight(num_blocks=23)
    beams = request("beams", prompt(16), max_tokens=24, beam_width=2, n=2)
    tight.begin(*(request(name, prompt(24, seed=each), max_tokens=16) for each, name in enumerate("ab")), beams)
    tight.end()
    assert tight.counts == (0, 0, 1)
    assert {each.request_id for each in tight.world.preempted} == {"beams"}


@pytest.mark.parametrize("gone", ["gpu-0", "gpu-1"])
def test_either_end_may_die_under_it(gone: str) -> None:
    tight = Tight()
    tight.begin(*three())
    tight.step_until_preempted()
    tight.world.step("gpu-0")
    tight.world.kill(gone)
    tight.end()


def test_a_sequence_that_is_aborted_on_its_way_leaves_nothing() -> None:
    tight = Tight()
    tight.begin(*three())
    tight.step_until_preempted()
    tight.world.send(AbortRequest(request_id=tight.world.preempted[0].request_id))
    tight.end()
