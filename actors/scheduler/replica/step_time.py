"""Predicts the time of a step by a linear law, fitted to the steps that a replica has done.

    time = w0 + w1 [has prefill] + w2 decode rows + w3 decode KV tokens + w4 prefill tokens + w5 prefill token pairs
           + w6 drafts

with all weights >= 0, so that more work is never predicted to be quicker. Decode rows read the KV of all tokens before
them; a prefill row of ``count`` tokens behind ``start`` others attends to ``count * (start + count / 2)`` pairs.

The fit minimises the squares of the relative errors with exponential forgetting, by coordinate descent on the normal
equations: pure, deterministic and of constant cost. A step that takes much longer than predicted (a hiccup, a first
launch of a kernel) counts as one a few deviations too long. If steps stay longer, the deviation grows with them and the
law follows. Steps of decodes alone vary little, so they have a separate deviation. No hiccup makes a step quicker, so
quick steps are believed at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NUM_WEIGHTS = 7
FORGET = 0.98
"""Weight of a step relative to the one after it: some 50 steps count."""
SWEEPS = 3
FIRST_DEVIATION = 0.05
"""The usual deviation before any is known."""
MAX_DEVIATIONS = 4.0
LEAST_TIME_S = 1e-6
LEAST_MOMENT = 1e-30
"""A feature that has not been seen for so long keeps its weight."""
MIN_STEPS = 8
"""The first steps, which are taken as they are because nothing is known yet of what is usual."""
SCALES = (1.0, 1.0, 1e-2, 1e-5, 1e-3, 1e-7, 1e-2)
"""Unit of each feature, such that all are of about the same size."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes. Counts of rows and tokens; ``pairs``: of a prefill token and one it attends to;
    ``drafts``: tokens that decodes verify besides."""

    decodes: int = 0
    decode_context: int = 0
    prefill: int = 0
    pairs: float = 0.0
    drafts: int = 0

    def features(self) -> tuple[float, ...]:
        """In the units of the fit."""
        raw = (1.0, float(self.prefill > 0), self.decodes, self.decode_context, self.prefill, self.pairs, self.drafts)
        return tuple(value * scale for value, scale in zip(raw, SCALES, strict=True))


class StepTime:
    """The law of one replica. Times in seconds."""

    def __init__(self) -> None:
        self._weights = [0.0] * NUM_WEIGHTS
        self._moments = [[0.0] * NUM_WEIGHTS for _ in range(NUM_WEIGHTS)]
        self._targets = [0.0] * NUM_WEIGHTS
        self._num_steps = [0, 0]
        self._deviations = [FIRST_DEVIATION, FIRST_DEVIATION]

    def deviation(self, work: Work) -> float:
        """Recent usual size of (measured - predicted) / predicted of steps like this, with or without prefill."""
        return self._deviations[work.prefill > 0]

    def predict_s(self, work: Work) -> float:
        """Expected time of a step; 0.0 before anything is known."""
        return sum(weight * value for weight, value in zip(self._weights, work.features(), strict=True))

    def prefill_s(self, start: int, count: float) -> float:
        """What a row of ``count`` tokens of prefill behind ``start`` others adds to a step."""
        per_token, per_pair = self._weights[4] * SCALES[4], self._weights[5] * SCALES[5]
        return count * (per_token + per_pair * (start + count / 2))

    def prefill_in(self, time_s: float, start: int) -> float:
        """The largest count for which :meth:`prefill_s` is at most ``time_s`` >= 0; infinite if nothing limits it."""
        per_token, half = self._weights[4] * SCALES[4], self._weights[5] * SCALES[5] / 2
        slope = per_token + 2 * half * start
        root = slope + math.sqrt(slope * slope + 4 * half * time_s)
        return 2 * time_s / root if root > 0 else math.inf

    def learn(self, work: Work, time_s: float) -> None:
        """One step has taken ``time_s`` (ignored unless positive)."""
        if not time_s > 0:
            return
        expected, kind = self.predict_s(work), work.prefill > 0
        if self._num_steps[kind] >= MIN_STEPS and expected > LEAST_TIME_S:
            error = (time_s - expected) / expected
            deviation = self._deviations[kind]
            limit = MAX_DEVIATIONS * max(deviation, 0.01)
            time_s = min(time_s, expected * (1 + limit))
            self._deviations[kind] += (min(abs(error), 2 * limit) - deviation) * (1 - FORGET) * 2
        self._num_steps[kind] += 1
        self._fit([value / time_s for value in work.features()])

    def _fit(self, row: list[float]) -> None:
        """Fit the law to give 1 for ``row`` (features over the measured time), and for the rows before it."""
        moments, targets, weights = self._moments, self._targets, self._weights
        for i, value in enumerate(row):
            line = moments[i]
            targets[i] = FORGET * targets[i] + value
            for j, other in enumerate(row):
                line[j] = FORGET * line[j] + value * other
        for _ in range(SWEEPS):
            for i, line in enumerate(moments):
                if line[i] > LEAST_MOMENT:
                    rest = targets[i] - sum(m * w for m, w in zip(line, weights, strict=True)) + line[i] * weights[i]
                    weights[i] = max(0.0, rest / line[i])
