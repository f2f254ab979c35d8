"""Keeps the reports sent over ``control``, to send them again after a restart of the bus, which may have lost some.

Without them a pull, or orders to a disk, would hold blocks until the executor ends, and sequences would wait for an
adapter for ever.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from pagebus.bus.messages import AdapterRead, DiskReport, PullReport

MOST = 1024
"""Reports of each kind that are kept."""

Report = AdapterRead | DiskReport | PullReport


class Reports:
    """The newest reports of one executor for one scheduler. Sending them again changes nothing: pulls, and plans that
    want an adapter, have numbers of their own. Disk reports are numbered here, because a block may be read twice."""

    def __init__(self) -> None:
        self._told: dict[type[Report], deque[Report]] = {}
        self._num_numbered = 0

    def note(self, report: Report, name: str, epoch: int) -> Report:
        """Keep a report. Returns what this executor says, under its name and epoch."""
        report = replace(report, replica=name, executor_epoch=epoch)
        if isinstance(report, DiskReport) and not report.number:
            self._num_numbered += 1
            report = replace(report, number=self._num_numbered)
        told = self._told.setdefault(type(report), deque(maxlen=MOST))
        if told and told[-1].scheduler_epoch < report.scheduler_epoch:
            told.clear()
        told.append(report)
        return report

    def take(self) -> list[Report]:
        """All of them, each kind in its order, to be said and noted again."""
        told = [report for each in self._told.values() for report in each]
        self._told.clear()
        return told
