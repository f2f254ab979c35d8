"""The adapters of a step's tokens, as layers and heads see them."""

from __future__ import annotations

import torch

from pagebus.actors.executor.device.ops import Ops
from pagebus.actors.executor.in_thread import in_thread
from pagebus.actors.executor.layers.adapted.products import AdapterPass
from pagebus.actors.executor.layers.adapted.slots import AdapterSlots
from tests.helpers.engine_driver import ints

CPU = torch.device("cpu")


def of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class World:
    """Two slots, each with an adapter whose place has the slot's number, and passes of one of them."""

    def __init__(self) -> None:
        self.current = AdapterPass()
        self.slots = AdapterSlots(self.current, Ops.reference(), 3, 4, CPU, adapt_heads=True)
        self.slots.of_slot[:2] = 0, 1
        assert self.slots.send(ints([0, 1]))

    def run(self, slot: int) -> list[int]:
        """A pass of three tokens of a slot; the places of their adapters."""
        with self.slots.planned(of(slot), of(0, 3), 3, None):
            assert self.current.plan is not None
            return self.current.plan.of_token.tolist()

    def score(self) -> list[int]:
        """The places of the adapters that logits of two of the pass's tokens are made by."""
        with self.slots.scored(of(0, 2)):
            assert self.current.rows is not None
            return self.current.rows.of_token.tolist()


def test_a_pass_and_the_logits_behind_it_have_the_adapters_of_its_rows() -> None:
    """Beside them nothing is added."""
    world = World()
    assert world.run(1) == [1, 1, 1]
    assert world.current.plan is None
    assert world.score() == [1, 1]
    assert world.current.rows is None


def test_a_pass_of_another_thread_changes_nothing() -> None:
    """Graphs are captured between a step's pass and the logits of its prompt."""
    world = World()
    assert world.run(1) == [1, 1, 1]
    assert in_thread(world.run, 0).result() == [0, 0, 0]
    assert world.score() == [1, 1]
