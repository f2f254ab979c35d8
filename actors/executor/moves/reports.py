"""What has been said of pulls, for a bus that has been started anew: it may have lost what nobody had read."""

from __future__ import annotations

from collections import deque

from pagebus.bus.messages import PullReport

MOST = 1024
"""Reports that are kept; a pull whose report is lost holds blocks until its executor ends."""


class PullReports:
    """Of one executor, the newest for one scheduler. Saying them again changes nothing."""

    def __init__(self) -> None:
        self._told: deque[PullReport] = deque(maxlen=MOST)

    def note(self, report: PullReport) -> bool:
        """Keep a report. Returns whether it is of a pull that has failed."""
        if self._told and self._told[-1].scheduler_epoch < report.scheduler_epoch:
            self._told.clear()
        self._told.append(report)
        return bool(report.error)

    def take(self) -> list[PullReport]:
        """All of them, to be said and noted again."""
        told = list(self._told)
        self._told.clear()
        return told
