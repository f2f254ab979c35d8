"""Whoever pushes jobs straight onto their stream and reads what came of them: each has to be answered once, and as an
interactive client is.

It stands beside the server of the bus, so that it knows for certain what it has pushed and read. What a server loses
that comes back with less than it had, only Redis knew: then what is not there any more is pushed again, and may be
answered twice.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from pagebus.bus.codec import decode, encode
from pagebus.bus.messages import Job as QueuedJob
from pagebus.bus.messages import JobResult
from tests.chaos.load import Answer, Job, difference
from tests.dst.world import World

LOOK_S = 0.25
BATCH = "nightly"
ENDS = ("completed", "failed", "cancelled")


@dataclass(slots=True)
class Pushed:
    """A job: its entries (several if a server has lost it), the life of the server that has the last one, and how often
    it was answered."""

    place: int
    batch: str
    entries: set[tuple[int, int]] = field(default_factory=set)
    life: int = 0
    answers: int = 0


class Queued:
    """``jobs`` and what the oracle says to each, ``expected``."""

    def __init__(
        self,
        world: World,
        jobs: list[Job],
        expected: list[dict[int, tuple[Any, ...]]],
        rng: random.Random,
        tell: Callable[[str], None],
    ) -> None:
        self.answers = 0
        self.problems: list[str] = []
        self._world, self._jobs, self._expected, self._rng, self._tell = world, jobs, expected, rng, tell
        self._names, self._server, self._network = world.names, world.server, world.network
        self._pushed: dict[str, Pushed] = {}
        self._ends = Counter[str]()
        self._cancelled = False

    async def ask_all(self, *, spread_s: float, cancels: bool) -> None:
        """Push all jobs, ``spread_s`` apart in all, and wait until there are no more faults and each is answered. Some
        of them are a batch, which may be cancelled."""
        pushing = asyncio.create_task(self._push_all(spread_s, cancels))
        try:
            while not self.problems and not (pushing.done() and self._is_over):
                await asyncio.sleep(LOOK_S)
                self._take()
                self._push_lost()
            self._take()
        finally:
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
        self._check_counts()

    @property
    def _entries(self) -> dict[tuple[int, int], Any]:
        """What is on the stream of jobs."""
        return self._server.stream(self._names.jobs).fields

    @property
    def _is_over(self) -> bool:
        """Whether all is answered, and no server can come back with what was."""
        return self._world.healed and self.answers == len(self._jobs) and not self._entries

    @property
    def waiting(self) -> list[str]:
        """Jobs that are not answered yet."""
        return [name for name, pushed in self._pushed.items() if not pushed.answers]

    # -- in -----------------------------------------------------------------------------------------------------------
    async def _push_all(self, spread_s: float, cancels: bool) -> None:
        for place in range(len(self._jobs)):
            await asyncio.sleep(self._rng.uniform(0, spread_s / len(self._jobs)))
            self._push(f"queued-{place}", place, BATCH if place % 2 else "")
        if cancels:
            await asyncio.sleep(self._rng.expovariate(1.0))
            self._tell("queue cancels its batch")
            self._cancelled = True
            self._server.counters.setdefault(self._names.batch(BATCH), Counter())["cancel"] = 1

    def _push(self, custom_id: str, place: int, batch: str) -> None:
        job = self._jobs[place]
        request = {"custom_id": custom_id, "method": "POST", "url": job.path, "body": dict(job.body)}
        queued = QueuedJob(request=orjson.dumps(request).decode(), batch=batch)
        at = self._server.publish(self._names.jobs, encode(queued))
        pushed = self._pushed.setdefault(custom_id, Pushed(place, batch))
        pushed.entries.add(at)
        pushed.life = self._network.life
        self._tell(f"queue pushes {custom_id} as {at[0]}-{at[1]}")

    def _push_lost(self) -> None:
        """Again, what a server has lost."""
        for custom_id in self.waiting:
            pushed = self._pushed[custom_id]
            if pushed.life != self._network.life and not pushed.entries & self._entries.keys():
                self._push(custom_id, pushed.place, pushed.batch)

    # -- out ----------------------------------------------------------------------------------------------------------
    def _take(self) -> None:
        stream = self._server.stream(self._names.job_results)
        for position in list(stream.ids):
            result = decode(stream.fields[position])
            assert isinstance(result, JobResult)
            self._check(result)
            stream.remove(position)

    def _check(self, result: JobResult) -> None:
        pushed = self._pushed[result.custom_id]
        pushed.answers += 1
        about = f"{result.custom_id} ({result.job})"
        if pushed.answers > 1:
            if pushed.life == self._network.life and len(pushed.entries) == 1:
                self.problems.append(f"{about} is answered {pushed.answers} times")
            return
        self.answers += 1
        line = orjson.loads(result.result)
        self._tell(f"queue has {about}")
        if (
            line["error"] is not None
            and line["error"]["code"] == "batch_cancelled"
            and self._cancelled
            and pushed.batch
        ):
            self._ends["cancelled"] += 1
        elif line["response"] is None or line["response"]["status_code"] != 200:
            self.problems.append(f"{about}: {result.result}"[:500])
        else:
            self._ends["completed"] += bool(pushed.batch)
            answer = Answer()
            answer.add_all(line["response"]["body"])
            if answer.told() != self._expected[pushed.place]:
                self.problems.append(f"{about}: {difference(self._expected[pushed.place], answer.told())}")

    def _check_counts(self) -> None:
        """What is counted of the batch, if no server has lost anything."""
        if self.problems or self._network.life > 1:
            return
        counts = self._server.counters.get(self._names.batch(BATCH), {})
        counted = {name: counts.get(name, 0) for name in ENDS}
        if counted != {name: self._ends[name] for name in ENDS}:
            self.problems.append(f"of the batch {counted} are counted instead of {dict(self._ends)}")
