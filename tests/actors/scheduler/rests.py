"""Schedulers that often stop looking for drafts, and soon look again."""

from __future__ import annotations

from itertools import cycle

import pytest

from pagebus.actors.scheduler.replica.drafts.watch import Watch
from pagebus.bus.messages import StepPlan


def rest_often(patch: pytest.MonkeyPatch) -> None:
    """For four steps in nine, whatever is accepted: it takes some until no draft is in flight any more."""
    turns = cycle([True] * 5 + [False] * 4)
    patch.setattr(Watch, "looks", lambda watch: next(turns))


def is_rest(plan: StepPlan) -> bool:
    """Whether the plan's step looks for no drafts."""
    return plan.num_decodes > 0 and not len(plan.latest_starts) and not plan.new_sequences
