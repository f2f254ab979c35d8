"""What the scheduler concludes from the leases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagebus.actors.scheduler.events import IngressLost
from pagebus.actors.scheduler.service.membership import DRAINED, Membership
from pagebus.bus.contract import FENCE_INDEX, LeaseInfo


def executor(epoch: int, state: str = "ready") -> LeaseInfo:
    info = {"state": state, "num_blocks": 64, "block_size": 16, "max_num_seqs": 4, "max_model_len": 256}
    return LeaseInfo(kind="executor", name="gpu-0", epoch=epoch, info=info)


def detokenizer(position: str | None) -> LeaseInfo:
    positions = {} if position is None else {"results:gpu-0": position}
    return LeaseInfo(kind="detokenizer", name="text", epoch=1, info={"state": "ready", "positions": positions})


@pytest.mark.parametrize(
    ("position", "is_deaf"),
    [
        (None, True),
        ("0-0", True),
        ("4-17", True),
        (f"4-{FENCE_INDEX}", True),  # it will forget the replica, though a later executor has lived and died meanwhile
        ("7-0", False),
        (f"7-{FENCE_INDEX}", False),
    ],
)
def test_a_detokenizer_is_deaf_to_an_executor_whose_results_it_has_not_reached(
    position: str | None, is_deaf: bool
) -> None:
    membership = Membership(lambda event: None, lambda *_: None)
    membership.look([executor(7), detokenizer(position)])
    assert membership.deaf_to("gpu-0") == (("text",) if is_deaf else ())


def test_all_detokenizers_are_deaf_to_an_executor_that_the_bus_was_restarted_under() -> None:
    membership = Membership(lambda event: None, lambda *_: None)
    membership.look([executor(7), detokenizer("7-12")])
    membership.bus_restarted()
    assert membership.deaf_to("gpu-0") == ("text",)


@pytest.mark.parametrize(("state", "reason"), [("ready", "its lease has ended"), ("draining", DRAINED)])
def test_who_ended_as_he_was_told_to_is_not_taken_for_dead(state: str, reason: str) -> None:
    """Each is shut out once its lease is gone, and the reason says which it was."""
    told: list[tuple[str, int, str]] = []
    membership = Membership(lambda event: None, lambda *fence: told.append(fence))
    membership.look([executor(7)])
    membership.look([executor(7, state)])
    membership.look([], {("executor", "gpu-0")})
    assert told == [("gpu-0", 7, reason)]


def test_a_detokenizer_that_dies_before_it_was_ready_holds_nothing_back() -> None:
    """It has read nothing yet, and nobody waits for it: once its lease is gone, results may be trimmed without it."""
    events: list[object] = []
    membership = Membership(events.append, lambda *_: None)
    loading = LeaseInfo(kind="detokenizer", name="text", epoch=1, info={"state": "starting", "positions": {}})
    membership.look([executor(7), loading])
    assert membership.positions == {"text": {}}
    membership.look([executor(7)])
    assert membership.positions == {}
    assert events == []


def test_a_detokenizer_whose_lease_lapses_still_counts() -> None:
    """It may only be frozen: what it has not read is kept until its lease is revoked."""
    membership = Membership(lambda event: None, lambda *_: None)
    membership.look([executor(7), detokenizer("7-12")])
    membership.look([executor(7)])
    assert list(membership.positions) == ["text"]
    membership.look([executor(7)], {("detokenizer", "text")})
    assert membership.positions == {}


def test_an_ingress_and_a_jobs_actor_may_have_one_name() -> None:
    """Names are told apart by kind alone: neither is taken for the other one's next life."""
    events: list[object] = []
    membership = Membership(events.append, lambda *_: None)
    leases = [LeaseInfo(kind=kind, name="a", epoch=epoch) for kind, epoch in (("ingress", 5), ("jobs", 6))]
    for _ in range(2):
        membership.look(leases)
    assert set(membership.ingresses) == {"a@5", "a@6"}
    assert events == []


def test_an_ingress_whose_lease_lapses_still_counts_beside_a_jobs_actor_of_its_name() -> None:
    """It may only be frozen, until its own lease is revoked; the other one lives on, and loses nothing."""
    events: list[object] = []
    membership = Membership(events.append, lambda *_: None)
    ingress, jobs = (LeaseInfo(kind=kind, name="a", epoch=epoch) for kind, epoch in (("ingress", 5), ("jobs", 6)))
    membership.look([ingress, jobs])
    membership.look([jobs])
    assert events == []
    assert membership.absent([jobs]) == [("ingress", "a")]
    membership.look([jobs], {("ingress", "a")})
    assert events == [IngressLost("a@5")]
    membership.look([replace(jobs, epoch=7)])
    assert events == [IngressLost("a@5"), IngressLost("a@6")], "another life of its own kind"
    assert list(membership.ingresses) == ["a@7"]
