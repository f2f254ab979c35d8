"""What ranks tell each other of their steps."""

from __future__ import annotations

import pytest

from pagebus.actors.executor.device.agreement import Agreement, compare, copied_by_all
from pagebus.actors.executor.graphs.graphs import empty_step
from pagebus.actors.executor.ranks.drift import DriftCheck
from pagebus.bus.messages import StepPlan
from tests.helpers.ranks.thread_comm import ThreadComm, thread_comms

HALF = 1 << 31
"""So many steps take weeks. A word that holds their number is negative from then on, and begins anew after twice as
many."""


def words(comm: ThreadComm, step: int, copied_step: int) -> list[int]:
    """What a rank tells of a step."""
    work = empty_step()
    DriftCheck(Agreement(comm)).begin(StepPlan(step=step, planned_s=0.0, num_decodes=0), work, copied_step)
    assert work.agreed is not None
    found: list[int] = work.agreed.tolist()
    return found


@pytest.mark.parametrize("step", [9, HALF - 1, HALF, HALF + 3, 2 * HALF - 1, 2 * HALF, 2 * HALF + 5, 5 * HALF])
def test_copies_are_done_up_to_where_all_ranks_say(step: int) -> None:
    """However many steps there have been."""
    told = [words(comm, step, step - behind) for comm, behind in zip(thread_comms(3), (0, 7, 2), strict=True)]
    compare(told)
    assert copied_by_all(told, step) == step - 7


def test_copies_for_an_earlier_scheduler_are_not_done() -> None:
    told = [words(comm, 12, copied) for comm, copied in zip(thread_comms(2), (12, 0), strict=True)]
    assert copied_by_all(told, 12) == 0
