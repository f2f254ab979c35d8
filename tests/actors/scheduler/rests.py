"""Schedulers that often stop looking up drafts, and soon look again."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.replica.drafts import depth
from pagebus.actors.scheduler.replica.drafts.watch import Watch
from pagebus.bus.messages import StepPlan


class RestlessWatch(Watch):
    """Rests four steps in nine, whatever is accepted: it takes some until no draft is in flight any more."""

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def looks(self) -> bool:
        self._steps += 1
        return self._steps % 9 < 5


def rest_often(patch: pytest.MonkeyPatch) -> None:
    """Replicas that are made from now on have such a watch."""
    patch.setattr(depth, "Watch", RestlessWatch)


def is_rest(plan: StepPlan) -> bool:
    """Whether the plan's step looks for no drafts."""
    return plan.num_decodes > 0 and not len(plan.latest_starts) and not plan.new_sequences
