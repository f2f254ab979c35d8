"""What tests of sliding windows share: small sizes, and a sequence that is preempted behind its window."""

from __future__ import annotations

from dataclasses import dataclass

from pagebus.actors.scheduler.replica.preemption import preempt
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.messages import NewSequence, TokenizedRequest
from tests.actors.scheduler.world import World, prompt, request

WINDOW, SIZE, BUDGET = 10, 4, 8
"""Tokens that layers look back on, those of a block, and those of a step."""


def replica(world: World) -> Replica:
    return world.core.replicas["gpu-0"]


def held(world: World) -> int:
    pool = replica(world).pool
    return pool.num_blocks - pool.num_free


def entered(world: World, name: str) -> list[NewSequence]:
    """What plans said of a request's sequences as they entered."""
    ids = {heard.started.sequence_id for heard in world.heard.values() if heard.started.request_id == name}
    return [new for _, plan in world.plans for new in plan.new_sequences if new.sequence_id in ids]


def run_alone(world: World, *sent: TokenizedRequest) -> None:
    """One after the other."""
    for each in sent:
        world.send(each)
        world.run()


@dataclass(frozen=True, slots=True)
class Held:
    """What a sequence held when it was preempted. ``first_seen``: the first block that its next token looks back on."""

    first_block: int
    first_windowed: int
    first_seen: int
    num_pages: int


def preempt_at(world: World, steps: int) -> tuple[Sequence, Held]:
    """A sequence of 60 tokens that is to have 30 more, preempted after so many steps."""
    world.send(request("a", prompt(60), max_tokens=30))
    for _ in range(steps):
        world.step()
    (sequence,) = replica(world).slots.occupied()
    seen = (int(replica(world).slots.computed[sequence.slot]) - WINDOW + 1) // SIZE
    before = Held(sequence.first_block, sequence.first_windowed, seen, len(sequence.pages))
    preempt(replica(world), sequence)
    world.core.planner.requeue(replica(world))
    return sequence, before


def resume(world: World) -> None:
    """To the end, at which nothing may be left."""
    world.core.planner.touch_all()
    world.run()
    world.check_end()
