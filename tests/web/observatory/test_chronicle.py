"""What an ingress writes down of the deployment, and the errors that it counts."""

from __future__ import annotations

from typing import Any

from pagebus.bus.contract import LeaseInfo
from pagebus.web.observatory.chronicle import KEPT, SEEN_S, Chronicle, Incident
from pagebus.web.observatory.failures import FAILURES_S, Failures, failures_of
from pagebus.web.observatory.roster import ORDER_TTL_S, Roster
from pagebus.web.observatory.vitals import FIGURES


def lease(actor: str, epoch: int, state: str = "ready", **info: Any) -> LeaseInfo:
    return LeaseInfo("executor", actor, epoch, {"state": state, "actor": actor, **info})


def scheduler(actor: str, epoch: int) -> LeaseInfo:
    return LeaseInfo("scheduler", "scheduler", epoch, {"state": "ready", "actor": actor})


def told(roster: Roster) -> list[tuple[float, str, str]]:
    """The incidents, the oldest first."""
    return [(each.at_s, each.what, each.actor) for each in reversed(roster.chronicle.newest())]


def test_lives_and_their_ends_are_written_down() -> None:
    """Each once, however often the leases are looked at: who was there at first is no news, a newcomer is when it is
    ready; ends by accident and after a drain; a new life, and the same one whose lease had ended."""
    roster = Roster()
    looks = [
        [lease("a", 1)],
        [lease("a", 1), lease("b", 1, "loading")],
        [lease("a", 1), lease("b", 1)],
        [lease("b", 1, "draining")],
        [lease("a", 1)],
        [lease("a", 2, "loading"), lease("b", 2, "loading")],
        [lease("a", 2), lease("b", 2)],
    ]
    for at_s, leases in enumerate(looks):
        roster.update(leases, float(at_s))
        roster.update(leases, at_s + 0.5)
    assert told(roster) == [
        (2.0, "joined", "b"), (3.0, "died", "a"), (4.0, "ended", "b"), (4.0, "renewed", "a"), (5.0, "died", "a"),
        (6.0, "back", "a"), (6.0, "back", "b"),
    ]  # fmt: skip
    assert [each.after_s for each in roster.chronicle.newest()[:2]] == [2.0, 1.0]


def test_an_end_that_was_ordered_is_no_death() -> None:
    """Though nobody saw it drain; an order that was not obeyed in its time explains nothing."""
    roster = Roster()
    roster.update([lease("a", 1), lease("b", 1)], 1.0)
    roster.ordered("executor", "a", 2.0)
    roster.ordered("executor", "b", 2.0)
    roster.ordered("executor", "nobody", 2.0)
    roster.update([lease("b", 1)], 3.0)
    roster.update([], 3.0 + ORDER_TTL_S)
    assert told(roster) == [(3.0, "ended", "a"), (3.0 + ORDER_TTL_S, "died", "b")]


def test_a_role_that_moves_is_written_down() -> None:
    """A standby has the scheduler's lease: who held it before is told."""
    roster = Roster()
    roster.update([scheduler("one", 1)], 1.0)
    roster.update([scheduler("two", 2)], 2.0)
    assert told(roster) == [(2.0, "died", "one"), (2.0, "moved", "two"), (2.0, "joined", "two")]
    assert roster.chronicle.newest()[1].before == "one"


def test_an_outage_is_one_from_its_beginning_to_its_end() -> None:
    """Whatever is missing meanwhile. A start is none."""
    chronicle = Chronicle()
    for at_s, missing in enumerate([("bus",), (), ("executor",), ("executor", "scheduler"), (), ()]):
        chronicle.lacks(missing, float(at_s))
    assert chronicle.newest() == [
        Incident(4.0, "answered", after_s=2.0), Incident(2.0, "outage", missing=("executor",)),
    ]  # fmt: skip


def test_resumed_sequences_are_counted_from_one_look_to_the_next() -> None:
    """Not what was counted before, nor when the scheduler begins anew, nor what came at a time that nobody knows."""
    chronicle = Chronicle()
    for at_s, total in ((1.0, 3.0), (2.0, 5.0), (3.0, 0.0), (4.0, 1.0), (5.0 + SEEN_S, 9.0)):
        chronicle.resumed(total, at_s)
    assert chronicle.newest() == [Incident(4.0, "resumed", count=1), Incident(2.0, "resumed", count=2)]


def test_only_the_last_incidents_are_kept() -> None:
    chronicle = Chronicle()
    for at_s in range(KEPT + 5):
        chronicle.note(Incident(float(at_s), "died", "a"))
    assert [each.at_s for each in chronicle.newest()] == [float(at_s) for at_s in range(KEPT + 4, 4, -1)]


def test_errors_are_counted_by_status() -> None:
    """Rates times spans, also where samples are missing; a status that has a line of its own is in no other."""
    figures = {"refused_per_s": 1.5, "timeouts_per_s": 0.5, "client_errors_per_s": 2.5, "server_errors_per_s": 0.2}
    samples = [[at_s, *(figures.get(name) for name in FIGURES)] for at_s in (2.0, 4.0, 10.0)]
    found = failures_of({"every_s": 2.0, "figures": list(FIGURES), "samples": samples})
    assert found == Failures(FAILURES_S, refused=15, timeouts=5, others=5, server=2)
    assert failures_of({"every_s": 2.0, "figures": list(FIGURES), "samples": []}) == Failures(FAILURES_S, 0, 0, 0, 0)
