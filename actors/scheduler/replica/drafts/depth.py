"""Chooses how many drafts each decode of a step gets: as many as bring more tokens per second than without.

The likeliest drafts come first. Of growing numbers of them the one is taken with which the step is expected to have
most tokens in its time. Drafts chosen so have been lucky more often than they will be, so what is expected is measured
by what came of such choices before. Where the best number is none, single drafts are tried again now and then, ever
more seldom while they fail, since only what is tried shows that it has become right.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.replica.drafts.chances import Chances
from pagebus.actors.scheduler.replica.drafts.prices import Prices
from pagebus.actors.scheduler.replica.slots import Slots
from pagebus.bus.messages import Int32Array

LEAST_PAUSE, MOST_PAUSE = 8, 512
"""Steps without drafts between two in which some are tried."""
NEWEST_SHARE = 0.05
"""Weight of the newest step in how much of what was expected has come."""
LEAST_HONEST = 0.1
TRIAL_ROWS = 4
"""Rows of such a step that get a draft."""
LEAST_GAIN = 1.02
"""A step with drafts is expected to be so much better than one without: less is lost in noise."""


class Depth:
    """Of one replica whose slots are ``num_slots``."""

    def __init__(self, num_slots: int) -> None:
        self.chances = Chances(num_slots)
        self.prices = Prices()
        self.num_trials = 0
        self._pause = LEAST_PAUSE
        self._waited = 0
        self._expected: deque[float] = deque()
        self._hoped = self._came = 1.0

    def choose(self, slots: Slots, wanted: Int32Array, room: int, *, alone: bool) -> Int32Array:
        """Drafts [d] for the step's decodes in ``slots`` [d]: at most ``wanted`` [d] each, and ``room`` in all.
        ``alone``: the step has no prompts. Call it for each step; :meth:`learn` tells what came of each, in order."""
        self._expected.append(0.0)
        rows, drafts = wanted.nonzero()[0], np.zeros(len(slots), np.int32)
        if not len(rows) or room <= 0 or (alone and self.prices.is_plain_due(len(slots))):
            return drafts
        drafts[rows] = self._best(len(slots), self.chances.of(slots[rows]), wanted[rows], room)
        if np.count_nonzero(drafts):
            self._waited, self._pause = 0, LEAST_PAUSE
            return drafts
        self._waited += 1
        if self._waited >= self._pause:
            self._try(rows, drafts, min(room, TRIAL_ROWS))
            if self._pause == MOST_PAUSE:
                self.prices.forget(len(slots))
        return drafts

    def _best(self, num_rows: int, chances: NDArray[np.float64], wanted: Int32Array, room: int) -> Int32Array:
        """Of the rows that want some [c]."""
        places = np.arange(1, int(wanted.max()) + 1)
        of_places = np.where(places <= wanted[:, None], chances[:, None] ** places, 0.0)
        order = np.argsort(-of_places, axis=None, kind="stable")[: min(room, int(wanted.sum()))]
        gained = np.cumsum(of_places.ravel()[order])
        counts = np.unique(np.minimum(1 << np.arange(len(order).bit_length() + 1), len(order)))
        honest = max(min(1.0, self._came / self._hoped), LEAST_HONEST)
        rates = (num_rows + honest * gained[counts - 1]) / self.prices.times(num_rows, counts)
        best = int(rates.argmax())
        if rates[best] < LEAST_GAIN * num_rows:
            return np.zeros(len(wanted), np.int32)
        self._expected[-1] = float(gained[counts[best] - 1])
        taken = np.bincount(order[: counts[best]] // len(places), minlength=len(wanted))
        return taken.astype(np.int32)

    def learn(self, slots: Slots, planned: Int32Array, accepted: Int32Array) -> None:
        """Of the drafts ``planned`` for each slot [m] in the next step so many were ``accepted``."""
        expected = self._expected.popleft()
        self.chances.learn(slots, planned, accepted)
        if expected:
            self._hoped += (expected - self._hoped) * NEWEST_SHARE
            self._came += (float(accepted.sum()) - self._came) * NEWEST_SHARE

    def _try(self, rows: NDArray[np.intp], drafts: Int32Array, count: int) -> None:
        """A draft for some of these rows, others each time, in place."""
        begin = self.num_trials * count % len(rows)
        drafts[np.roll(rows, -begin)[:count]] = 1
        self.num_trials += 1
        self._waited, self._pause = 0, min(2 * self._pause, MOST_PAUSE)
