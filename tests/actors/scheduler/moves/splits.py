"""Roles for prompts as short as those of tests."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.fleet import auto_roles, roles
from pagebus.actors.scheduler.fleet.demand import Demand
from pagebus.actors.scheduler.replica.replica import Replica


def split_often(patch: pytest.MonkeyPatch, least_prefill: int = 10, least_left: int = 2) -> None:
    """From now on prompts of so many tokens are computed on prefill replicas, if so many are to follow."""
    patch.setattr(roles, "LEAST_PREFILL_S", least_prefill)  # fake executors compute a token a second
    patch.setattr(roles, "LEAST_LEFT", least_left)


def change_often(patch: pytest.MonkeyPatch, look_s: float = 0.005) -> None:
    """From now on automatic roles are given anew so often, whatever the load is."""

    def best(demand: Demand, replicas: list[Replica], current: int, itl_s: float | None) -> int:
        return (current + 1) % max(1, len(replicas) + 1)

    patch.setattr(auto_roles, "best", best)
    patch.setattr(auto_roles, "LOOK_S", look_s)
    patch.setattr(auto_roles, "LOOKS", 1)
    patch.setattr(auto_roles, "STAY_S", 0.0)
