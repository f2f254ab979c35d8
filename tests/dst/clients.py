"""Clients of the ingresses: those of the chaos tests, over connections without sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import aiohttp
from aiohttp.client_proto import ResponseHandler

from tests.chaos.load import Answer, Job, Load, WrongAnswer, difference, make_jobs
from tests.chaos.structured import structured
from tests.dst.loop import SimulatedLoop

MOST_TOKENS = 20
SHARED = 0.5
"""Of the turns with a key: a second client reads the same answer, at whatever ingress."""
LATER_S = 0.2
"""How much later it begins, at most."""


def simple_jobs(count: int) -> list[Job]:
    """Completions without log probabilities, some of them structured: chats are rendered by a process of their own, and
    the oracle here has no logits."""
    jobs = [job for job in make_jobs(4 * count, seed=5, most_tokens=MOST_TOKENS) if job.path == "/v1/completions"]
    jobs = [job for job in jobs if "logprobs" not in job.body]
    for number, job in enumerate(jobs):
        if number % 5 == 0:
            jobs[number] = Job(job.path, {**job.body, "echo": True})
        if number % 5 == 1:
            jobs[number] = Job(job.path, {**job.body, "return_token_ids": True})
    return structured(jobs[:count])


class Connector(aiohttp.BaseConnector):
    """Connects to any ingress that listens, at random."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random) -> None:
        super().__init__(force_close=True, limit=0)
        self._world, self._rng = loop, rng

    async def _create_connection(self, req, traces, timeout) -> ResponseHandler:  # type: ignore[no-untyped-def]  # noqa: ASYNC109
        await asyncio.sleep(self._rng.uniform(1e-4, 1e-3))
        ports = list(self._world.listeners)
        try:
            if not ports:
                raise ConnectionRefusedError("no ingress listens")
            protocol = self._world.connect(self._factory, self._rng.choice(ports), "127.0.0.1")
        except OSError as error:
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error
        assert isinstance(protocol, ResponseHandler)
        return protocol


class Clients(Load):
    """Ask jobs ``turns`` times each. ``leaves``: the chance of a turn to be given up at a random moment."""

    def __init__(self, loop: SimulatedLoop, jobs: list[Job], rng: random.Random, tell: Callable[[str], None]) -> None:
        super().__init__("http://pagebus", jobs)
        self._world, self._rng, self._tell = loop, rng, tell
        self.left = 0

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=Connector(self._world, self._rng), timeout=aiohttp.ClientTimeout(None))

    async def ask_all(self, *, turns: int, keyed: float, spread_s: float, leaves: float) -> None:
        """All jobs, ``spread_s`` apart at most."""
        async with self.session() as session:
            await asyncio.gather(
                *(self._ask(session, place, turns, keyed, spread_s, leaves) for place in range(len(self.jobs)))
            )

    async def _ask(
        self, session: aiohttp.ClientSession, place: int, turns: int, keyed: float, spread_s: float, leaves: float
    ) -> None:
        rng = self._rng
        for turn in range(turns):
            await asyncio.sleep(rng.uniform(0, spread_s))
            key = f"key-{place}-{turn}" if rng.random() < keyed else None
            later_s = [0.0, rng.uniform(0, LATER_S)] if key and rng.random() < SHARED else [0.0]
            reading = (self._read(session, place, f"job {place}, turn {turn}", key, each, leaves) for each in later_s)
            if not all(await asyncio.gather(*reading)):
                return

    async def _read(
        self, session: aiohttp.ClientSession, place: int, about: str, key: str | None, later_s: float, leaves: float
    ) -> bool:
        """One client asks ``later_s`` from now; whether there was no problem."""
        rng = self._rng
        await asyncio.sleep(later_s)
        streamed = rng.random() < 0.6
        second = ", second reader" if later_s else ""
        about = f"{about} ({key or 'no key'}, {'streamed' if streamed else 'whole'}{second})"
        self._tell(f"client asks {about}")
        try:
            async with asyncio.timeout(rng.expovariate(1.0) if rng.random() < leaves else None):
                answer = await self.ask(session, self.jobs[place], key=key, streamed=streamed)
        except TimeoutError:
            self.left += 1
            self._tell(f"client leaves {about}")
            return True
        except (WrongAnswer, aiohttp.ClientError, Exception) as error:
            self.problems.append(f"{about}: {type(error).__name__}: {error}")
            return False
        self.check(place, about, answer)
        return True

    def check(self, place: int, about: str, answer: Answer) -> None:
        """Is this what the oracle says alone?"""
        if answer.told() != self.expected[place]:
            self.problems.append(f"{about}: {difference(self.expected[place], answer.told())}")
            return
        self.answers += 1
        self._tell(f"client has {about}")
