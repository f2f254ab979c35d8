"""Engines whose drafts the scheduler believes to be cheap, however long a step takes here."""

from __future__ import annotations

import numpy as np
import pytest

from pagebus.actors.scheduler.replica.drafts.prices import Prices


def cheap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prices, "times", lambda prices, num_rows, drafts: np.ones(len(drafts)))


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap(monkeypatch)
