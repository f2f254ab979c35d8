"""Links between modelled executors: how long transfers take, alone and beside others, and what becomes of lost ones."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from pagebus.actors.simulator.links import Links, LinkSpeed, Transfer


class Clock:
    """Four executors, ``a`` to ``d``, with links of 100 bytes a second. ``ends``: by pull, when it ended; None: it
    failed."""

    def __init__(self, **speed: float) -> None:
        self.ends: dict[int, float | None] = {}
        self.links = Links(LinkSpeed(bytes_per_s=100.0, **speed), self.at, self._done)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._pushed = 0
        for address in "abcd":
            self.links.join(address)

    def at(self, at_s: float, what: Callable[[float], None]) -> None:
        self._pushed += 1
        heappush(self._heap, (at_s, self._pushed, what))

    def _done(self, at_s: float, transfer: Transfer, there: bool) -> None:
        self.ends[transfer.number] = at_s if there else None

    def pull(self, at_s: float, number: int, pair: str, num_bytes: float, *, hosts: bool = False) -> None:
        transfer = Transfer(number, *pair, num_bytes, hosts)
        self.at(at_s, lambda now_s: self.links.pull(transfer, now_s))

    def run(self) -> None:
        while self._heap:
            at_s, _, what = heappop(self._heap)
            what(at_s)


def test_a_lone_pull_takes_its_latency_and_its_bytes() -> None:
    """The first between two opens the link; those of a pair come one after another."""
    clock = Clock(latency_s=0.5, open_s=2.0)
    clock.pull(1.0, 1, "ab", 300)
    clock.pull(1.0, 2, "ab", 100)
    clock.run()
    assert clock.ends == {1: pytest.approx(6.5), 2: pytest.approx(8.0)}


@pytest.mark.parametrize("pairs", [("ab", "ac"), ("ba", "ca"), ("ab", "cb")])
def test_pulls_share_the_end_that_they_have_in_common(pairs: tuple[str, str]) -> None:
    """The second comes when a third of the first is there; each has half of the rate until one ends."""
    clock = Clock()
    clock.pull(0.0, 1, pairs[0], 300)
    clock.pull(1.0, 2, pairs[1], 100)
    clock.run()
    assert clock.ends == {1: pytest.approx(4.0), 2: pytest.approx(3.0)}


def test_directions_and_other_pairs_do_not_disturb() -> None:
    clock = Clock()
    for number, pair in enumerate(("ab", "ba", "cd")):
        clock.pull(0.0, number, pair, 100)
    clock.run()
    assert list(clock.ends.values()) == [pytest.approx(1.0)] * 3


def test_host_tiers_have_links_of_their_own() -> None:
    """The own one among them. Two that are read by one executor share what it takes in."""
    clock = Clock(host_bytes_per_s=50.0)
    clock.pull(0.0, 1, "ab", 100)
    clock.pull(0.0, 2, "ab", 100, hosts=True)
    clock.pull(0.0, 3, "bb", 100, hosts=True)
    clock.pull(0.0, 4, "cc", 100, hosts=True)
    clock.run()
    assert clock.ends == {1: pytest.approx(1.0), 4: pytest.approx(2.0), 2: pytest.approx(4.0), 3: pytest.approx(4.0)}


def test_an_executor_is_lost_that_reads_its_own_host_tier() -> None:
    clock = Clock(host_bytes_per_s=50.0)
    clock.pull(0.0, 1, "aa", 100, hosts=True)
    clock.pull(0.0, 2, "ab", 100, hosts=True)
    clock.at(1.0, lambda at_s: clock.links.lose(at_s, "a"))
    clock.run()
    assert clock.ends == {2: None}


def test_an_executor_is_lost() -> None:
    """What is pulled from it fails, also later. What it pulls is over, and others have its share."""
    clock = Clock()
    for number, pair in enumerate(("ab", "ca", "cd", "ab")):
        clock.pull(0.0, number, pair, 200)
    clock.at(1.0, lambda at_s: clock.links.lose(at_s, "a"))
    clock.pull(2.0, 4, "ab", 100)
    clock.pull(2.0, 5, "ba", 100)
    clock.run()
    assert clock.ends == {0: None, 3: None, 2: pytest.approx(2.5), 4: None}
