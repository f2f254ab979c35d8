"""Chooses how many drafts each decode of a step gets: as many as yield the most tokens per second.

The likeliest drafts come first, and their number is the one with the most expected tokens per second of step time.
Drafts chosen like this were luckier in the past than they will be. So the expectation is scaled by what earlier choices
yielded. If the best number is none, a few rows try one draft now and then, because only trials show that drafts have
become right.

An account bounds the cost of wrong drafts, whatever the estimates are. Each step pays in a small share of its time,
each draft takes its price out, and accepted drafts pay back. Drafts that the account cannot pay are not planned.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.replica.drafts.chances import Chances
from pagebus.actors.scheduler.replica.drafts.prices import Prices
from pagebus.actors.scheduler.replica.drafts.watch import Watch
from pagebus.actors.scheduler.replica.slots import Slots
from pagebus.bus.messages import Int32Array

ALLOWANCE = 0.002
"""What each step pays in, in steps: the share by which wrong drafts may lengthen steps in the long run."""
SAVED = 0.25
"""What the account begins with, and the most that it saves of what steps pay in."""
MOST_EARNED = 16.0
"""The most that it keeps of what accepted drafts earn: enough for a few large steps in flight."""
NEWEST_SHARE = 0.05
"""Weight of the newest step in the averages of expected and accepted drafts."""
LEAST_HONEST = 0.1
TRIAL_ROWS = 4
"""Rows that try a draft at a time."""
TRIAL_PAUSE = 8
"""Steps between two trials beside drafts that pay."""
FIRST_DRAFTS, GROWTH = 32, 4
"""The most drafts of a step: this number, or this many times the most tried before with as many rows, because prices
must not be extrapolated far."""
LEAST_GAIN = 1.02
"""The least expected gain of a step with drafts; smaller ones are noise."""
FORGET_AFTER = 512
"""Steps without drafts, though some were ready, after which prices are lowered."""


class Bet(NamedTuple):
    """The drafts of a step in flight: how many in how many rows, the price ``paid`` for them, in steps, and how many
    are ``expected`` to be accepted, 0 in a trial."""

    rows: int = 0
    drafts: int = 0
    paid: float = 0.0
    expected: float = 0.0


NO_BET = Bet()


class Depth:
    """Chooses for one replica with ``num_slots`` slots."""

    def __init__(self, num_slots: int) -> None:
        self.chances = Chances(num_slots)
        self.prices = Prices()
        self.watch = Watch()
        self.credit = SAVED
        self.num_trials = 0
        self._waited = self._since_trial = 0
        self._bets: deque[Bet] = deque()
        self._hoped = self._came = 1.0

    def none(self) -> None:
        """Take the place of :meth:`choose` for a step that can have no drafts."""
        if self.credit < SAVED:
            self.credit += ALLOWANCE
        self._bets.append(NO_BET)

    def choose(self, slots: Slots, wanted: Int32Array, room: int, *, alone: bool) -> Int32Array:
        """Drafts [d] for the step's decodes in ``slots`` [d]: at most ``wanted`` [d] each, and ``room`` in all.
        ``alone``: the step has no prompts. Call this or :meth:`none` for each step, then :meth:`learn` with its result,
        in order."""
        self.none()
        rows, drafts = wanted.nonzero()[0], np.zeros(len(slots), np.int32)
        if not len(rows) or room <= 0 or (alone and self.prices.is_plain_due(len(slots))):
            return drafts
        drafts[rows], expected = self._best(len(slots), self.chances.of(slots[rows]), wanted[rows], room)
        self._waited += 1
        self._since_trial += 1
        if not np.count_nonzero(drafts) or self._since_trial >= TRIAL_PAUSE:  # perhaps other rows have become right
            self._try(slots, rows[drafts[rows] == 0], drafts, min(room - int(drafts.sum()), TRIAL_ROWS))
        count = int(drafts.sum())
        if count:
            self._waited, paid = 0, self._price(len(slots), count)
            self.credit -= paid
            self._bets[-1] = Bet(len(slots), count, paid, expected)
        elif self._waited % FORGET_AFTER == 0:
            self.prices.forget(len(slots))
        return drafts

    def _price(self, num_rows: int, num_drafts: int) -> float:
        """What ``num_drafts`` add to a step of ``num_rows``, in steps."""
        return float(self.prices.times(num_rows, np.array([num_drafts], np.int32))[0]) - 1

    def _best(
        self, num_rows: int, chances: NDArray[np.float64], wanted: Int32Array, room: int
    ) -> tuple[Int32Array, float]:
        """The best numbers of drafts for the rows that want some [c], and how many are expected to be accepted."""
        places = np.arange(1, int(wanted.max()) + 1)
        of_places = np.where(places <= wanted[:, None], chances[:, None] ** places, 0.0)
        most = max(GROWTH * self.prices.most_tried(num_rows), FIRST_DRAFTS)
        order = np.argsort(-of_places, axis=None, kind="stable")[: min(room, most, int(wanted.sum()))]
        gained = np.cumsum(of_places.ravel()[order])
        counts = np.unique(np.minimum(1 << np.arange(len(order).bit_length() + 1), len(order)))
        honest = max(min(1.0, self._came / self._hoped), LEAST_HONEST)
        times = self.prices.times(num_rows, counts)
        rates = np.where(times - 1 <= self.credit, (num_rows + honest * gained[counts - 1]) / times, 0.0)
        best = int(rates.argmax())
        if rates[best] < LEAST_GAIN * num_rows:
            return np.zeros(len(wanted), np.int32), 0.0
        taken = np.bincount(order[: counts[best]] // len(places), minlength=len(wanted))
        return taken.astype(np.int32), float(gained[counts[best] - 1])

    def learn(self, slots: Slots, planned: Int32Array, accepted: Int32Array) -> None:
        """Learn how many of the drafts ``planned`` for each slot [m] in the oldest step in flight were ``accepted``."""
        bet = self._bets.popleft()
        if not bet.drafts:
            return
        self.chances.learn(slots, planned, accepted)
        right = float(accepted.sum())
        if right:
            self.watch.wake()
        if bet.expected:
            self._hoped += (bet.expected - self._hoped) * NEWEST_SHARE
            self._came += (right - self._came) * NEWEST_SHARE
        spent = self._price(bet.rows, count) if (count := int(planned.sum())) else 0.0  # perhaps there was no room
        earned = bet.paid - spent + right / bet.rows
        self.credit = min(self.credit + earned, MOST_EARNED)

    def _try(self, slots: Slots, rows: NDArray[np.intp], drafts: Int32Array, count: int) -> None:
        """Give one draft to ``count`` of these rows, in place, if the account can pay for them: the rows that have
        tried the fewest, and others each time."""
        count = min(count, len(rows))
        if count <= 0 or min(self._price(len(slots), count), SAVED) > self.credit:
            return
        rows = np.roll(rows, -(self.num_trials * count % len(rows)))
        drafts[rows[np.argsort(self.chances.tried[slots[rows]], kind="stable")[:count]]] = 1
        self.num_trials += 1
        self._since_trial = 0
