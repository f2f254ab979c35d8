"""Automatic roles: what load asks for how many prefill replicas, and how seldom that changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pagebus.actors.scheduler.events import ReplicaSuspended
from pagebus.actors.scheduler.fleet import auto_roles
from pagebus.actors.scheduler.fleet.auto_roles import LOOK_S, LOOKS, STAY_S, AutoRoles, best
from pagebus.actors.scheduler.fleet.demand import WINDOW_S, Demand
from pagebus.actors.scheduler.fleet.roles import Roles
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.replica.step_time import Work
from tests.actors.scheduler.moves.fake_pulls import FakePulls
from tests.actors.scheduler.moves.splits import change_often, split_often
from tests.actors.scheduler.world import World, prompt, request

RATE = 1.0
"""Tokens of prompts that a fake executor computes in a second."""


class FixedLaw:
    """A step takes 10 ms, and a thousandth of that for each stream more."""

    def predict_s(self, work: Work) -> float:
        return 0.01 * (1 + work.decodes / 1000)


def demand(work: float, prompts: float = 4.0, streams: float = 8.0, context: float = 400.0) -> Demand:
    """As many replicas' worth of long prompts."""
    return Demand(work * RATE, streams=streams, prompts=prompts, context=context, law=FixedLaw())  # type: ignore[arg-type]


def replicas(count: int) -> tuple[World, list[Replica]]:
    world, lenders = World(auto_roles=True), dict[str, np.ndarray]()
    for number in range(count):
        pulls = FakePulls(kind="alike", lenders=lenders)
        world.join(name=f"gpu-{number}", epoch=number + 1, pulls=pulls, num_blocks=400, max_num_seqs=16)
    return world, list(world.core.replicas.values())


@pytest.mark.parametrize(
    ("count", "load", "current", "wanted"),
    [
        (2, demand(0.5), 0, 1),
        (2, demand(0.8), 0, 0),  # one has not the time for it
        (2, demand(0.8), 1, 1),  # but goes on
        (2, demand(1.0), 1, 0),
        (2, demand(0.5, prompts=0.5), 0, 0),  # streams hardly notice
        (2, demand(0.5, streams=15.0), 0, 0),  # the other has not the slots for all of them
        (2, demand(0.5, context=1400.0), 0, 0),  # or the blocks
        (4, demand(0.5), 0, 1),
        (4, demand(1.2), 0, 2),
        (4, demand(1.2), 1, 2),
        (4, demand(1.7), 2, 2),
        (4, demand(1.0), 3, 2),  # two are enough, by the stricter limits
        (4, demand(3.0), 0, 0),
        (1, demand(0.5), 0, 0),
    ],
)
def test_as_many_compute_prompts_as_are_needed_and_none_where_that_costs(
    count: int, load: Demand, current: int, wanted: int
) -> None:
    _, live = replicas(count)
    assert best(load, live, current, None) == wanted


def test_with_a_target_decode_replicas_help() -> None:
    _, live = replicas(2)
    assert (best(demand(0.9), live, 0, None), best(demand(0.9), live, 0, 0.03)) == (0, 1)


def test_steps_that_would_be_much_longer_are_not_worth_it() -> None:
    """All streams on one replica: each has to wait for the others."""
    _, live = replicas(2)
    load = demand(0.05)
    load.law = type("Steep", (), {"predict_s": lambda _, work: 0.001 * work.decodes})()
    assert best(load, live, 0, None) == 0


@dataclass
class Clock:
    """Automatic roles of a few replicas that want what they are told."""

    patch: pytest.MonkeyPatch
    count: int = 2
    now_s: float = 100.0
    changes: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world, _ = replicas(self.count)
        planner = self.world.core.planner
        assert planner.auto_roles is not None
        self.roles, self.auto = planner.roles, planner.auto_roles

    def want(self, number: int, seconds: float) -> None:
        self.patch.setattr(auto_roles, "best", lambda *_: number)
        for _ in range(int(seconds / LOOK_S)):
            self.now_s += LOOK_S
            if self.auto.look(self.now_s):
                self.changes.append((self.now_s - 100.0, self.roles.num_prefill))


def test_what_is_right_for_a_moment_is_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(10):
        clock.want(1, (LOOKS - 1) * LOOK_S)
        clock.want(0, LOOK_S)
    assert clock.changes == []


def test_roles_are_adopted_seldom_and_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.want(1, 2 * LOOKS)
    clock.want(0, 2 * LOOKS)
    clock.want(1, STAY_S + LOOKS)
    (on_s, first), (off_s, second), (again_s, third) = clock.changes
    assert (first, second, third) == (1, 0, 1)
    assert off_s - on_s < STAY_S <= again_s - off_s


def test_a_look_takes_what_was_admitted_since_the_last() -> None:
    """After many of the same it is what they all say."""
    _, live = replicas(1)
    load = Demand()
    assert not load.look(live, 0.0)
    for second in range(1, int(6 * WINDOW_S)):
        load.admitted(4000)
        load.admitted(2000)
        assert load.look(live, float(second))
    assert load.prompt_tokens == pytest.approx(6000, rel=0.01)
    assert load.prompts == pytest.approx(2, rel=0.01)
    assert load.most_tokens() == pytest.approx(6000, rel=0.01)
    load.admitted(60_000)
    load.look(live, 6 * WINDOW_S)
    assert load.most_tokens() > 20_000 > load.prompt_tokens


def test_streams_and_their_steps_are_measured() -> None:
    world, live = replicas(1)
    auto = world.core.planner.auto_roles
    assert auto is not None
    world.send(*(request(f"r{each}", prompt(12, seed=each), max_tokens=60) for each in range(3)))
    for _ in range(30):
        world.step()
    auto.demand.look(live, 1.0)
    auto.demand.look(live, 1000.0)
    assert auto.demand.streams == pytest.approx(3.0)
    assert auto.demand.context > 3 * 12
    world.run()


@pytest.mark.parametrize("drains", [False, True])
def test_running_sequences_go_on_while_roles_change(monkeypatch: pytest.MonkeyPatch, drains: bool) -> None:
    """Whatever the roles are, with replicas that leave and come."""
    split_often(monkeypatch, 24, 4)
    change_often(monkeypatch)
    world, _ = replicas(3)
    seen = set()
    for number in range(12):
        world.send(request(f"r{number}", prompt(30, seed=number), max_tokens=30))
        for _ in range(4):
            world.step()
            planner = world.core.planner
            roles = [planner.roles.role(each) for each in planner.replicas.values()]
            seen.add(tuple(roles))
            assert ("prefill" in roles) == ("decode" in roles)
    world.send(ReplicaSuspended("gpu-2", drains))
    world.run()
    world.check_end()
    assert {tuple[str, ...](("", "", "")), ("prefill", "decode", "decode"), ("prefill", "prefill", "decode")} <= seen
    assert [note for note in world.notes if note.event == "roles have changed"]


def test_a_scheduler_without_them_measures_nothing() -> None:
    assert World().core.planner.auto_roles is None
    assert isinstance(AutoRoles(Roles(), None).demand, Demand)
