"""Slots: how far each sequence is."""

from __future__ import annotations

from array import array

import numpy as np

from pagebus.actors.scheduler.core.new_request import make_request
from pagebus.actors.scheduler.order import Order
from pagebus.actors.scheduler.replica.slots import SlotTable
from pagebus.actors.scheduler.request import Sequence
from pagebus.actors.scheduler.states import State
from tests.actors.scheduler.world import request


def sequence(number: int, tokens: list[int], limit: int = 50) -> Sequence:
    made = make_request(request(f"r{number}", tokens), (), Order())
    return Sequence(
        id=number, request=made, choice_index=0, seed=0, order=number, limit=limit, tokens=array("i", tokens), hashes=[]
    )


def test_a_sequence_is_behind_by_its_tokens() -> None:
    """Prefill, prefix hits and decode are one number; empty slots are behind by nothing."""
    running = SlotTable(3, 4)
    first, second = sequence(1, [1, 2, 3]), sequence(2, [1, 2, 3, 4, 5, 6])
    second.blocks = [7]
    running.enter(first, 0)
    running.enter(second, 4)
    assert running.behind().tolist() == [3, 2, 0]
    assert running.capacity.tolist() == [0, 4, 0]


def test_sampled_tokens_count_before_they_are_known() -> None:
    """After its last token is planned to be computed, a sequence has one more."""
    running = SlotTable(1, 4)
    running.enter(sequence(1, [1, 2, 3]), 0)
    slots = np.array([0])
    assert running.advance(slots, np.array([2], np.int32), 1).tolist() == [False]
    assert running.behind().tolist() == [1]
    assert running.advance(slots, np.array([1], np.int32), 2).tolist() == [True]
    assert (running.total[0], running.known[0]) == (4, 3)
    assert running.behind().tolist() == [1]


def test_nothing_is_computed_for_a_token_beyond_the_limit() -> None:
    """Once the last token is planned to be sampled, the sequence is not behind any more."""
    running = SlotTable(1, 4)
    running.enter(sequence(1, [1, 2, 3], limit=4), 0)
    running.advance(np.array([0]), np.array([3], np.int32), 1)
    assert running.behind().tolist() == [0]


def test_known_tokens_reach_the_sequence_at_block_boundaries_and_at_the_end() -> None:
    """In between they are in the arrays only."""
    running = SlotTable(2, 4)
    one = sequence(1, [1, 2, 3])
    one.blocks = [0, 1]
    running.enter(one, 0)
    slots = np.array([0])
    running.advance(slots, np.array([3], np.int32), 1)
    for step, token in enumerate((10, 11, 12), 2):
        running.take_tokens(slots, np.array([token], np.int32))
        running.advance(slots, np.array([1], np.int32), step)
    assert one.tokens.tolist() == [1, 2, 3, 10]
    running.leave(one)
    assert one.tokens.tolist() == [1, 2, 3, 10, 11, 12]
    assert (one.slot, one.last_step) == (-1, 4)
    running.check_integrity()


def test_the_lowest_free_slot_is_taken() -> None:
    """So the rows in use stay together."""
    running = SlotTable(3, 4)
    sequences = [sequence(i, [1]) for i in range(1, 4)]
    for each in sequences:
        running.enter(each, 0)
    for each in (sequences[2], sequences[0]):
        running.leave(each)
        each.become(State.WAITING)
    assert len(running) == 1
    running.enter(sequences[2], 0)
    assert sequences[2].slot == 0
