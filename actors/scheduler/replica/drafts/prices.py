"""The price of drafts: how much longer a step of decodes takes with them than without.

A law predicts the time of a step without drafts. With drafts it takes a multiple of that, which is learned by powers of
two of the numbers of rows and drafts, and interpolated between them. Numbers not tried yet are taken to be cheap, so
that they are tried and become known.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.scheduler.replica.step_time import LEAST_TIME_S, StepTime, Work
from pagebus.bus.messages import Int32Array

UNTRIED = 0.05
"""What one draft for each row is taken to add to a step before any was tried, as a share of the step."""
NEWEST_SHARE = 0.25
QUICKER_SHARE = 0.5
"""Weights of the newest step in the average. No hiccup makes a step quicker, so quicker steps weigh more."""
MOST_TIMES = 8.0
"""A step that takes longer than this many without drafts is a hiccup, such as the first launch of a kernel."""
MIN_PLAIN = 2
"""Steps without drafts that must be known before one with drafts is compared with them."""
FIRST_SPAN, MOST_SPAN = 2, 128
"""The number of steps with drafts between two without, doubled each time: the time of steps without drafts must be
learned early, and changes."""
MOST_UNLEARNED = 16
"""Steps without drafts that are kept until one with drafts is compared with them. Learning takes longer than planning,
and would be in vain where nothing is drafted."""
CHEAPER = 0.8
"""The factor by which :meth:`Prices.forget` lowers prices."""


@dataclass(slots=True)
class Tried:
    """Steps with about ``drafts`` drafts (an average) took ``times`` times as long as without."""

    drafts: float
    times: float


@dataclass(slots=True)
class Size:
    """Steps of about as many rows. ``plain``: how many without drafts are known, and ``factor``: how many times as long
    as the law says they take. ``tried``: the prices of drafts, by size. ``left``: steps with drafts until one without
    is due, and ``span``: their number after that."""

    plain: int = 0
    factor: float = 1.0
    tried: dict[int, Tried] = field(default_factory=dict)
    left: int = 0
    span: int = FIRST_SPAN


class Prices:
    """The prices of one replica, learned from steps of decodes alone, with and without drafts."""

    def __init__(self) -> None:
        self._law = StepTime()
        self._sizes: dict[int, Size] = {}
        self._in_flight: deque[tuple[Work, int] | None] = deque()
        self._unlearned: deque[tuple[Work, float]] = deque(maxlen=MOST_UNLEARNED)
        self._last_done_s = 0.0

    def _size(self, num_rows: int) -> Size:
        return self._sizes.setdefault(num_rows.bit_length(), Size())

    def planned(self, starts: Int32Array, num_decodes: int, num_drafts: int) -> None:
        """Note a planned step of rows that begin at ``starts`` [rows], the first ``num_decodes`` of them decodes with
        ``num_drafts`` drafts in all. :meth:`done` brings its time, in order."""
        if num_decodes == 0 or num_decodes < len(starts):
            self.skipped()
            return
        self._in_flight.append((Work(num_decodes, int(starts.sum())), num_drafts))
        size = self._size(num_decodes)
        size.left -= 1
        if not num_drafts:
            size.left, size.span = size.span, min(2 * size.span, MOST_SPAN)

    def skipped(self) -> None:
        """Note a planned step whose time teaches nothing."""
        self._in_flight.append(None)

    def is_plain_due(self, num_rows: int) -> bool:
        """Whether a step of this many decodes should have no drafts, to learn its time."""
        return self._size(num_rows).left <= 0

    def done(self, launched_s: float, done_s: float) -> None:
        """The next planned step was launched and done at these times of its executor's clock."""
        time_s, told = done_s - max(launched_s, self._last_done_s), self._in_flight.popleft()
        self._last_done_s = done_s
        if told is None or time_s <= 0:
            return
        work, num_drafts = told
        if not num_drafts:
            self._unlearned.append((work, time_s))
            return
        while self._unlearned:
            self._learn_plain(*self._unlearned.popleft())
        size = self._size(work.decodes)
        if size.plain >= MIN_PLAIN:
            expected_s = max(self._law.predict_s(work) * size.factor, LEAST_TIME_S)
            _learn(size.tried, num_drafts, time_s / expected_s)

    def _learn_plain(self, work: Work, time_s: float) -> None:
        """Learn the time of a step without drafts."""
        size = self._size(work.decodes)
        self._law.learn(work, time_s)
        factor = min(time_s / max(self._law.predict_s(work), LEAST_TIME_S), MOST_TIMES)
        size.plain += 1
        size.factor += (factor - size.factor) * max(1 / size.plain, NEWEST_SHARE)

    def times(self, num_rows: int, drafts: Int32Array) -> NDArray[np.float64]:
        """How many times as long a step of this many decodes takes with each number of ``drafts`` [n]; at least 1."""
        tried = [each for _, each in sorted(self._size(num_rows).tried.items())]
        counts = np.array([0.0, *(each.drafts for each in tried)])
        times = np.maximum.accumulate([1.0, *(each.times for each in tried)])
        slope = max(UNTRIED / num_rows, (times[-1] - 1) / counts[-1] if tried else 0.0)
        beyond = np.maximum(drafts - counts[-1], 0.0) * slope
        told: NDArray[np.float64] = np.interp(drafts, counts, times) + beyond
        return told

    def most_tried(self, num_rows: int) -> int:
        """The most drafts that steps of about this many decodes have had on average; 0: none."""
        return int(max((each.drafts for each in self._size(num_rows).tried.values()), default=0))

    def forget(self, num_rows: int) -> None:
        """Lower the prices for steps of this many decodes a little, so that one hiccup does not last for ever."""
        for each in self._size(num_rows).tried.values():
            each.times = 1 + (each.times - 1) * CHEAPER


def _learn(tried: dict[int, Tried], num_drafts: int, times: float) -> None:
    """Learn that a step with drafts took ``times`` times as long as without."""
    times = min(max(times, 1.0), MOST_TIMES)
    known = tried.get(num_drafts.bit_length())
    if known is None:
        tried[num_drafts.bit_length()] = Tried(num_drafts, times)
        return
    known.drafts += (num_drafts - known.drafts) * NEWEST_SHARE
    known.times += (times - known.times) * (QUICKER_SHARE if times < known.times else NEWEST_SHARE)
