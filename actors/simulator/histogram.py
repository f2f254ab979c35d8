"""Percentiles of any number of values in constant memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEAST, MOST, RATIO = 1e-6, 1e6, 1.002
_LOG = math.log(RATIO)
_BINS = math.ceil(math.log(MOST / LEAST) / _LOG) + 1
_PENDING = 65_536


class Histogram:
    """Values from 1e-6 to 1e6 in bins 0.2% wide; smallest, largest, count and sum are exact."""

    def __init__(self) -> None:
        self._bins = np.zeros(_BINS, np.int64)
        self._pending = np.empty(_PENDING)
        self._num_pending = 0
        self._count = 0
        self._sum = 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, value: float) -> None:
        """One value."""
        if self._num_pending == _PENDING:
            self._flush()
        self._pending[self._num_pending] = value
        self._num_pending += 1

    def add_all(self, values: NDArray[np.float64]) -> None:
        """Some values [n], n up to 65,536."""
        count = len(values)
        if self._num_pending + count > _PENDING:
            self._flush()
        self._pending[self._num_pending : self._num_pending + count] = values
        self._num_pending += count

    def _flush(self) -> None:
        values = self._pending[: self._num_pending]
        self._num_pending = 0
        if not len(values):
            return
        self._count += len(values)
        self._sum += float(values.sum())
        self._least, self._most = min(self._least, float(values.min())), max(self._most, float(values.max()))
        bins = np.log(np.clip(values, LEAST, MOST) / LEAST) / _LOG
        self._bins += np.bincount(bins.astype(np.int64), minlength=_BINS)

    @property
    def count(self) -> int:
        """How many values there were."""
        return self._count + self._num_pending

    @property
    def mean(self) -> float:
        """Their mean; 0 without any."""
        self._flush()
        return self._sum / self._count if self._count else 0.0

    def percentile(self, share: float) -> float:
        """The value that ``share`` (0 to 1) of all values do not exceed, within 0.2%; 0 without any."""
        self._flush()
        if not self._count:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self._bins), max(1, math.ceil(share * self._count))))
        return float(min(max(LEAST * RATIO ** (at + 0.5), self._least), self._most))

    def curve(self, points: int = 200) -> list[tuple[float, float]]:
        """(value, share of values up to it), for a picture."""
        return [(self.percentile(share), share) for share in np.linspace(0, 1, points).tolist()] if self.count else []
