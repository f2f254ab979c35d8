"""The states of a sequence, and the module that owns each transition. ``docs/scheduling.md`` has the same table."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """State of a sequence. It is queued in the first three states, and has a slot in the next two."""

    WAITING = "waiting"
    """Without a slot. Tokens computed before are recomputed or found in a cache."""
    SWAPPED = "swapped"
    """Without a slot. Its computed blocks are in the host tier of its former replica."""
    PREEMPTED_IN_FLIGHT = "preempted in flight"
    """Without a slot, while steps in flight still sample tokens for it. It gets no slot before their results."""
    BOUND = "bound"
    """In a slot that its executor does not know yet."""
    ENTERED = "entered"
    """In the executor's batch."""
    ENDED = "ended"


QUEUED = frozenset({State.WAITING, State.SWAPPED, State.PREEMPTED_IN_FLIGHT})
IN_SLOT = frozenset({State.BOUND, State.ENTERED})

TRANSITIONS: dict[tuple[State, State], str] = {
    (State.WAITING, State.BOUND): "slots",
    (State.SWAPPED, State.BOUND): "slots",
    (State.BOUND, State.ENTERED): "plan_builder",
    (State.BOUND, State.WAITING): "preemption",
    (State.BOUND, State.SWAPPED): "preemption",
    (State.BOUND, State.ENDED): "preemption",
    (State.ENTERED, State.WAITING): "preemption",
    (State.ENTERED, State.SWAPPED): "preemption",
    (State.ENTERED, State.PREEMPTED_IN_FLIGHT): "preemption",
    (State.ENTERED, State.ENDED): "preemption",
    (State.PREEMPTED_IN_FLIGHT, State.WAITING): "step_results",
    (State.PREEMPTED_IN_FLIGHT, State.SWAPPED): "step_results",
    (State.SWAPPED, State.WAITING): "host_tier",
    (State.WAITING, State.ENDED): "planner",
    (State.PREEMPTED_IN_FLIGHT, State.ENDED): "planner",
    (State.ENDED, State.WAITING): "lifecycle",
}
"""(from, to): the module that makes the transition. No other transition exists."""
