"""Pulls in a recording: which blocks an executor copied from which other one, when, and whether they came.

What a plan orders is in a log, which can be read at any time. Its report goes over a work stream, and is deleted as
the scheduler takes it in. One that was missed is noticed once a plan names the blocks; whether they had come is then
not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagebus.bus.messages import PullReport, StepPlan
from pagebus.bus.messages.moves import combine_reports

MOST_EARLY = 1024
"""Reports that are kept until the plan has been read that ordered the pull."""

Key = tuple[str, int, int]
"""Target, epoch of the scheduler, number."""


class PullLog:
    """Writes a row for each pull as soon as it has ended. ``lenders`` has the names of executors by the addresses of
    their caches; others may add to it. Times in rows are seconds after ``start_s``.

    A row has the number of the ``pull``; ``replica``, the target, and ``lender`` (empty: not known); ``ordered_s``;
    blocks of the lender, ``sources``, and those of the target that they are copied into, ``blocks``, in the same order.
    With ``hosts`` the sources are blocks of the lender's host tier. If they are known it has ``ended_s`` and ``there``,
    and of a failed pull ``error``.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], start_s: float, lenders: dict[str, str]) -> None:
        self.num_pulls = 0
        self._write, self._start_s, self._lenders = write, start_s, lenders
        self._open: dict[Key, tuple[str, dict[str, Any]]] = {}
        self._early: dict[Key, PullReport] = {}
        self._promised: set[Key] = set()
        """Which the next plan with their blocks does not end."""
        self._told: dict[Key, dict[int, PullReport]] = {}
        """Of pulls of several ranks, what some of these have said."""
        self._now_s = start_s

    def plan(self, replica: str, epoch: int, plan: StepPlan) -> None:
        """Note what a plan orders, and what it shows of earlier pulls."""
        self._now_s = max(self._now_s, plan.planned_s)
        mine = [key for key in self._open if key[0] == replica]
        for key in [key for key in mine if key[1] != epoch]:
            self._end(key, there=False, error="another scheduler took over")
        mine = [key for key in mine if key in self._open]
        if mine:
            columns = (plan.new_block_ids, plan.new_windowed, plan.appended_blocks, plan.appended_windowed)
            named = set(np.concatenate(columns).tolist())
            for key in [key for key in mine if not named.isdisjoint(self._open[key][1]["blocks"])]:
                if key in self._promised:
                    self._promised.discard(key)
                else:
                    self._end(key)
        at = 0
        for pull in plan.pulls:
            key, end = (replica, epoch, pull.pull), at + pull.num_blocks
            row = {"pull": pull.pull, "replica": replica, "ordered_s": round(plan.planned_s - self._start_s, 6)}
            row |= {"hosts": True} if pull.hosts else {}
            row |= {"sources": plan.pull_sources[at:end].tolist(), "blocks": plan.pull_blocks[at:end].tolist()}
            self._open[key] = pull.address, row
            at = end
            if (report := self._early.pop(key, None)) is not None:
                self.report(report)

    def report(self, report: PullReport) -> None:
        """Note the end of a pull, or of a rank's part of it."""
        key = report.replica, report.scheduler_epoch, report.pull
        self._now_s = max(self._now_s, report.ended_s)
        if report.promised:
            self._promised.add(key)
            return
        if (said := combine_reports(self._told.setdefault(key, {}), report)) is None:
            return
        self._told.pop(key)
        if key in self._open:
            self._end(key, said.ended_s, there=said.there, error=said.error)
        else:
            self._early[key] = said
            if len(self._early) > MOST_EARLY:
                del self._early[next(iter(self._early))]

    def lose(self, replica: str) -> None:
        """A target is gone."""
        for key in [key for key in self._open if key[0] == replica]:
            self._end(key, there=False, error="the executor was lost")

    def finish(self) -> None:
        """Write those that have not ended yet."""
        for address, row in self._open.values():
            self._put(address, row)
        self._open.clear()

    def _end(self, key: Key, ended_s: float = 0.0, *, there: bool | None = None, error: str = "") -> None:
        address, row = self._open.pop(key)
        self._told.pop(key, None)
        self._promised.discard(key)
        ended = round((ended_s or self._now_s) - self._start_s, 6)
        known: dict[str, Any] = {} if there is None else {"there": there}
        self._put(address, row | {"ended_s": ended} | known | ({"error": error} if error else {}))

    def _put(self, address: str, row: dict[str, Any]) -> None:
        self.num_pulls += 1
        self._write(row | {"lender": self._lenders.get(address, "")})
