"""Errors of the last minutes, counted by status from the samples of the history."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAILURES_S = 300.0
"""Seconds that are counted."""
_OF = {"429": "refused_per_s", "408": "timeouts_per_s", "4xx": "client_errors_per_s", "5xx": "server_errors_per_s"}


@dataclass(frozen=True, slots=True)
class Failures:
    """Errors sent to clients in the last ``over_s`` seconds: ``refused`` (429), ``timeouts`` (408), ``others`` of the
    client's (4xx), and the ``server``'s (5xx)."""

    over_s: float
    refused: int
    timeouts: int
    others: int
    server: int


def failures_of(history: Mapping[str, Any]) -> Failures:
    """Count what an answer of ``/api/history`` tells as rates: each sample's is that of the time since the one before,
    and the first one's of ``every_s``."""
    columns = {status: history["figures"].index(name) + 1 for status, name in _OF.items()}
    counts, before_s = dict.fromkeys(_OF, 0.0), None
    for sample in history["samples"]:
        span_s = history["every_s"] if before_s is None else sample[0] - before_s
        before_s = sample[0]
        for status, column in columns.items():
            counts[status] += (sample[column] or 0.0) * span_s
    refused, timeouts, clients, server = (round(counts[status]) for status in _OF)
    return Failures(FAILURES_S, refused, timeouts, max(0, clients - refused - timeouts), server)
