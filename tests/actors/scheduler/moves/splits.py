"""Roles for prompts as short as those of tests."""

from __future__ import annotations

import pytest

from pagebus.actors.scheduler.fleet import roles


def split_often(patch: pytest.MonkeyPatch, least_prefill: int = 10, least_left: int = 2) -> None:
    """From now on prompts of so many tokens are computed on prefill replicas, if so many are to follow."""
    patch.setattr(roles, "LEAST_PREFILL_S", least_prefill)  # fake executors compute a token a second
    patch.setattr(roles, "LEAST_LEFT", least_left)
