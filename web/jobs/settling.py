"""Stores results. Each is written in one transaction with the end of its entry and the count of its batch, so that none
is duplicated.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import Bus, Completion, Entry
from pagebus.bus.streams import JOBS_GROUP, Names


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job's entry. ``size``: its share of the window, in bytes."""

    completion: Completion
    size: int


class Settling:
    """Collects outcomes and stores them, as many at a time as there are."""

    def __init__(self, bus: Bus, names: Names, log: Log) -> None:
        self._bus = bus
        self._names = names
        self._log = log
        self._bus_retry = BusRetry(log, doing="results wait")
        self._waiting: list[Outcome] = []
        self._news = asyncio.Event()

    def put(self, outcome: Outcome) -> None:
        self._waiting.append(outcome)
        self._news.set()

    async def settled(self) -> list[Outcome]:
        """Wait for outcomes and store them."""
        await self._news.wait()
        self._news.clear()
        outcomes, self._waiting = self._waiting, []
        await self._bus_retry.until_taken(lambda: self._store([outcome.completion for outcome in outcomes]), "results")
        return outcomes

    async def end(self, entry: Entry) -> None:
        """End the entry of a batch; its results are in files."""
        await self._bus_retry.until_taken(lambda: self._bus.ack(JOBS_GROUP, [entry]), entry.stream + str(entry.id))

    async def _store(self, completions: list[Completion]) -> None:
        problems = await self._bus.complete(JOBS_GROUP, completions)
        refused = [(each, problem) for each, problem in zip(completions, problems, strict=True) if problem]
        for each, problem in refused:  # what was given as reply_to is no stream
            self._log.warning("a result goes to the usual stream", wanted=each.stream, error=problem)
        usual = [replace(each, stream=self._names.job_results) for each, _ in refused]
        for each, problem in zip(usual, await self._bus.complete(JOBS_GROUP, usual), strict=True):
            if problem:
                self._log.error("a job has no result", id=str(each.entry.id), error=problem)
