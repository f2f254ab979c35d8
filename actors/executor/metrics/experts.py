"""Metrics of experts: tokens by layer, and how evenly they are spread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagebus.actors.telemetry.metrics import Metrics

TOKENS = ("pagebus:expert_tokens_total", "Choices of an expert by a token, by layer.")
LOAD = ("pagebus:expert_load_ratio", "Tokens of a layer's busiest expert over the mean of all, since the last reading.")
UNUSED = ("pagebus:experts_unused", "Experts of a layer that no token chose since the last reading.")


class ExpertMetrics:
    """Of the ``layers`` that have experts: three series each, however many experts there are."""

    def __init__(self, metrics: Metrics, engine: str, layers: Sequence[int]) -> None:
        labels = [{"engine": engine, "layer": str(layer)} for layer in layers]
        self._tokens = [metrics.counter(*TOKENS, **each) for each in labels]
        self._load = [metrics.gauge(*LOAD, **each) for each in labels]
        self._unused = [metrics.gauge(*UNUSED, **each) for each in labels]
        self._before: npt.NDArray[np.int64] | None = None

    def update(self, totals: npt.NDArray[np.int64]) -> None:
        """``totals`` [L, E]: all tokens so far. Without new ones the gauges stay."""
        fresh = totals if self._before is None else totals - self._before
        self._before = totals.copy()
        for place, tokens in enumerate(fresh):
            total = int(tokens.sum())
            if total:
                self._tokens[place].inc(total)
                self._load[place].set(round(float(tokens.max()) * len(tokens) / total, 3))
                self._unused[place].set(int((tokens == 0).sum()))
