"""The rate of tokens while a load of constant concurrency lasts, without its beginning and its end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagebus.actors.bench.driver.client import Outcome

SHARE = 0.95
"""Of the most calls under way together; fewer are no full load."""


def full_load(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """Output tokens per second from when the load is full until it no longer is, and how many seconds that is.

    A call's first token counts when it came, and the others as spread evenly until its last one.
    """
    began, ended = under_way(outcomes)
    seconds = ended - began
    if seconds <= 0:
        return 0.0, 0.0
    first, last = (np.array([getattr(each, name) for each in outcomes]) for name in ("first_s", "last_s"))
    later = np.array([each.output_tokens - 1 for each in outcomes])
    overlap = np.clip(np.minimum(last, ended) - np.maximum(first, began), 0.0, None)
    share = np.divide(overlap, last - first, out=np.zeros_like(overlap), where=last > first)
    tokens = float((share * later).sum() + ((began <= first) & (first < ended)).sum())
    return tokens / seconds, seconds


def under_way(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """From when to when nearly as many calls as ever were under way."""
    changes = sorted([(each.sent_s, 1) for each in outcomes] + [(each.last_s, -1) for each in outcomes])
    counts = np.cumsum([change for _, change in changes])
    full = np.flatnonzero(counts >= SHARE * counts.max())
    return changes[full[0]][0], changes[min(full[-1] + 1, len(changes) - 1)][0]
