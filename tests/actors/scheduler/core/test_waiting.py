"""The order of the queue."""

from __future__ import annotations

from array import array

import pytest

from pagebus.actors.scheduler.core.new_request import make_request
from pagebus.actors.scheduler.core.waiting import WaitingQueue
from pagebus.actors.scheduler.order import Order
from pagebus.actors.scheduler.request import Sequence
from tests.actors.scheduler.world import request


def sequence(order: int, priority: int = 0) -> Sequence:
    made = make_request(request(f"r{order}", [1, 2], priority=priority), (), Order())
    return Sequence(id=order, request=made, choice_index=0, seed=0, order=order, limit=9, tokens=array("i"), hashes=[])


def test_lower_priority_numbers_first_then_arrival() -> None:
    """Whatever order they are added in."""
    waiting = WaitingQueue()
    for each in (sequence(3), sequence(1, 5), sequence(2, -1), sequence(4, -1), sequence(0)):
        waiting.add(each)
    assert [each.order for each in waiting] == [2, 4, 0, 3, 1]
    waiting.check_integrity()


def test_one_that_comes_back_takes_its_old_place() -> None:
    """Preempted, it is before all that arrived after it."""
    waiting = WaitingQueue()
    first, second = sequence(1), sequence(2)
    waiting.add(first)
    waiting.add(second)
    waiting.remove(first)
    assert [each.order for each in waiting] == [2]
    waiting.add(first)
    assert [each.order for each in waiting] == [1, 2]


def test_misuse_is_loud() -> None:
    """Adding twice and removing what is not there are errors."""
    waiting = WaitingQueue()
    one = sequence(1)
    waiting.add(one)
    with pytest.raises(ValueError, match="waits already"):
        waiting.add(one)
    waiting.remove(one)
    with pytest.raises(KeyError):
        waiting.remove(one)
    assert len(waiting) == 0
