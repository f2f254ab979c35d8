"""Storing results: first the result, then, in one transaction, the count of its batch and the end of its entry.

So a result may come twice (the actor dies between the two), never not at all.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass

from actors.actor import describe
from actors.logs import Log
from bus.contract import Bus, BusError, BusUnavailable, Entry
from bus.messages import JobResult
from bus.streams import JOBS_GROUP, Names

RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job's entry. ``counter``: the one of its batch to count it in."""

    entry: Entry
    stream: str
    result: JobResult
    counter: str
    size: int


class Settling:
    """Takes outcomes and stores them, as many at a time as there are."""

    def __init__(self, bus: Bus, names: Names, log: Log) -> None:
        self._bus = bus
        self._names = names
        self._log = log
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
        while True:
            try:
                await self._store(outcomes)
                await self._end(outcomes)
                return outcomes
            except BusUnavailable as error:
                self._log.warning("bus unavailable: results wait", error=describe(error))
                await asyncio.sleep(RETRY_S)

    async def end(self, entry: Entry) -> None:
        """The entry of a batch: its results are in files."""
        while True:
            try:
                return await self._bus.ack(JOBS_GROUP, [entry])
            except BusUnavailable as error:
                self._log.warning("bus unavailable: a batch waits", error=describe(error))
                await asyncio.sleep(RETRY_S)

    async def _store(self, outcomes: list[Outcome]) -> None:
        by_stream: dict[str, list[JobResult]] = defaultdict(list)
        for outcome in outcomes:
            by_stream[outcome.stream].append(outcome.result)
        for stream, results in by_stream.items():
            try:
                await self._bus.publish([(stream, result) for result in results])
            except BusUnavailable:
                raise
            except BusError as error:  # what was given as reply_to is no stream
                self._log.warning("results go to the usual stream", wanted=stream, error=describe(error))
                await self._bus.publish([(self._names.job_results, result) for result in results])

    async def _end(self, outcomes: list[Outcome]) -> None:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for outcome in outcomes:
            if outcome.result.batch:
                counts[self._names.batch(outcome.result.batch)][outcome.counter] += 1
        try:
            await self._bus.ack(JOBS_GROUP, [outcome.entry for outcome in outcomes], counts=counts)
        except BusUnavailable:
            raise
        except BusError as error:  # the name of a batch is taken by something that is no hash
            self._log.error("jobs not counted", error=describe(error))
