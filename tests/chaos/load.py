"""Clients that know what they must get: every answer is compared, to the byte, with that of a run without faults."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pagebus.web.http.errors import ASKED_ELSEWHERE

TRY_AGAIN = (429, 502, 503)
"""Refusals of what was not accepted."""
PAUSE_S = 0.1
PROSE = "the quick brown fox jumps over a lazy dog while emojis and 你好世界 wait in Straße"


class WrongAnswer(Exception):
    """What no client may ever see."""


class Broken(Exception):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to ask. The same job has the same answer each time, streamed or not."""

    path: str
    body: Mapping[str, Any]

    def without(self, *fields: str) -> Job:
        """The same, but for some fields of the body."""
        return Job(self.path, {name: value for name, value in self.body.items() if name not in fields})


@dataclass(slots=True)
class Answer:
    """What a client has: text (of calls, their names and arguments), log probabilities and end of each choice, and how
    many tokens were counted; ``times_s``: when events of a stream came."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, tuple[str, Any]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    times_s: list[float] = field(default_factory=list)
    last_id: str = ""

    def told(self) -> dict[int, tuple[Any, ...]]:
        """All that must be the same each time."""
        return {
            index: (self.texts.get(index, ""), self.logprobs.get(index), end, self.usage)
            for index, end in self.ends.items()
        }

    def add_all(self, body: Mapping[str, Any]) -> None:
        """A whole answer, or an event of a stream."""
        for choice in body["choices"]:
            self.add(choice)
        if (usage := body.get("usage")) is not None:
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]

    def add(self, choice: Mapping[str, Any]) -> None:
        """A choice of a whole answer, or a part of one from a stream."""
        index, part = choice["index"], choice.get("delta") or choice.get("message") or choice
        if index in self.ends:
            raise WrongAnswer(f"choice {index} goes on after its end")
        self.texts[index] = self.texts.get(index, "") + (part.get("text") or part.get("content") or "")
        for call in part.get("tool_calls") or ():
            self.texts[index] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        if (logprobs := choice.get("logprobs")) is not None:
            known = self.logprobs.setdefault(index, [])
            if "content" in logprobs:
                known += [(each["token"], each["logprob"]) for each in logprobs["content"]]
            else:
                known += zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        if choice.get("finish_reason") is not None:
            self.ends[index] = choice["finish_reason"], choice.get("stop_reason")


def make_jobs(count: int, *, seed: int, most_tokens: int) -> list[Job]:
    """Greedy and sampled, chats and completions, one choice and two, with stop strings and log probabilities."""
    rng = random.Random(seed)
    words = PROSE.split()
    shared = " ".join(rng.choices(words, k=30))
    jobs = []
    for index in range(count):
        text = " ".join(rng.choices(words, k=rng.randrange(2, 40)))
        text = f"{shared} {text}" if index % 5 == 0 else text
        body: dict[str, Any] = {"model": "oracle", "max_tokens": rng.randrange(most_tokens // 3, most_tokens)}
        body |= {"temperature": 0} if index % 3 == 0 else {"temperature": 1.0, "seed": index, "top_p": 0.95}
        if index % 7 == 1:
            body["n"] = 2
        if index % 7 == 2:
            body["stop"] = ["qu", "ö"]
        if index % 4 == 3:
            body["messages"] = [{"role": "user", "content": text}]
            if index % 8 == 3:
                body |= {"logprobs": True, "top_logprobs": 2}
        else:
            body["prompt"] = text
            if index % 8 == 1:
                body["logprobs"] = 2
        jobs.append(Job("/v1/chat/completions" if "messages" in body else "/v1/completions", body))
    return jobs


class Load:
    """``expected`` is filled by :meth:`learn`; :meth:`run` keeps ``len(jobs)`` requests under way."""

    def __init__(self, url: str, jobs: Sequence[Job]) -> None:
        self.url = url
        self.jobs = jobs
        self.expected: list[dict[int, tuple[Any, ...]]] = []
        self.answers = 0
        self.reconnects = 0
        self.refused = 0
        self.problems: list[str] = []
        self.streams: list[Answer] = []
        """Streams that have begun, finished or not."""

    async def learn(self) -> None:
        """The answers without faults."""
        async with self.session() as session:
            answers = await asyncio.gather(*(self.ask(session, job, key=None, streamed=False) for job in self.jobs))
        self.expected = [answer.told() for answer in answers]

    async def run(self, over: asyncio.Event, *, keyed: float, patience_s: float) -> None:
        """Ask all jobs again and again until ``over`` is set; a share ``keyed`` of the requests has an
        ``Idempotency-Key``. What is under way then is waited for. Who waits for ``patience_s`` complains."""
        self.problems.clear()
        self.streams.clear()
        self.answers = self.reconnects = self.refused = 0
        async with self.session() as session:
            clients = (self._client(session, place, over, keyed, patience_s) for place in range(len(self.jobs)))
            await asyncio.gather(*clients)

    def session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None))

    async def _client(
        self, session: aiohttp.ClientSession, place: int, over: asyncio.Event, keyed: float, patience_s: float
    ) -> None:
        rng = random.Random(place)
        turn = 0
        while not over.is_set() and not self.problems:
            key = uuid.uuid4().hex if rng.random() < keyed else None
            streamed = (place + turn) % 2 == 0
            turn += 1
            about = f"job {place} ({'keyed' if key else 'no key'}, {'streamed' if streamed else 'whole'})"
            try:
                async with asyncio.timeout(patience_s):
                    answer = await self.ask(session, self.jobs[place], key=key, streamed=streamed)
                if answer.told() != self.expected[place]:
                    raise WrongAnswer(difference(self.expected[place], answer.told()))
            except TimeoutError:
                self.problems.append(f"{about}: hangs")
            except (WrongAnswer, Broken, aiohttp.ClientError) as error:
                self.problems.append(f"{about}: {type(error).__name__}: {error}")
            else:
                self.answers += 1

    async def ask(self, session: aiohttp.ClientSession, job: Job, *, key: str | None, streamed: bool) -> Answer:
        """As a client does that wants its answer: what is refused is tried again, what broke off is resumed by key."""
        answer = Answer()
        if streamed:
            self.streams.append(answer)
        while True:
            try:
                if await self._try(session, job, answer, key, streamed):
                    return answer
            except aiohttp.ClientConnectorError:
                pass  # nobody listens: nothing was asked
            except (Broken, aiohttp.ClientError):
                if key is None:
                    raise
                self.reconnects += 1
            await asyncio.sleep(PAUSE_S)

    async def _try(
        self, session: aiohttp.ClientSession, job: Job, answer: Answer, key: str | None, streamed: bool
    ) -> bool:
        """One connection; False: refused for now."""
        headers = {} if key is None else {"Idempotency-Key": key}
        if answer.last_id:
            headers["Last-Event-ID"] = answer.last_id
        body = {**job.body, "stream": streamed}
        if streamed:
            body["stream_options"] = {"include_usage": True}
        async with session.post(f"{self.url}{job.path}", json=body, headers=headers) as response:
            if response.status in TRY_AGAIN:
                check_not_cut_off(await response.json())
                self.refused += 1
                return False
            if response.status != 200:
                raise WrongAnswer(f"status {response.status}: {(await response.text())[:300]}")
            if not streamed:
                answer.add_all(await response.json())
                return True
            await self._follow(response, answer)
            return True

    async def _follow(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        async for event_id, data in events(response):
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                check_not_cut_off(event)
                raise Broken(f"{event['error']}")
            answer.times_s.append(time.monotonic())
            answer.add_all(event)
            answer.last_id = event_id
            self.heard(answer)
        raise Broken("the stream ended without [DONE]")

    def heard(self, answer: Answer) -> None:
        """An event of a stream has come."""


def check_not_cut_off(body: Mapping[str, Any]) -> None:
    """Whatever a client is refused for, it is not that another one reads the same answer.

    Raises:
        WrongAnswer: it is.
    """
    if body["error"]["reason"] == ASKED_ELSEWHERE:
        raise WrongAnswer(f"cut off by another reader: {body['error']}")


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each event that came whole."""
    event_id, data = "", ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data:
            yield event_id, data
            data = ""


def difference(expected: Mapping[int, Any], told: Mapping[int, Any]) -> str:
    """Where two answers part."""
    for index, want in expected.items():
        have = told.get(index)
        if have is None:
            return f"choice {index} is missing"
        if have != want:
            place = next((i for i, (a, b) in enumerate(zip(want[0], have[0], strict=False)) if a != b), -1)
            return f"choice {index} differs from character {place} on: {have!r} instead of {want!r}"[:1500]
    return f"choices {sorted(told)} instead of {sorted(expected)}"


def silences(streams: Sequence[Answer], fault_s: float) -> list[float]:
    """Seconds from the fault to the next event, of every stream that was under way: the end of its longest gap around
    that moment (events that were on their way then do not count)."""
    found = []
    for stream in streams:
        gaps = [
            (after - before, after)
            for before, after in zip(stream.times_s, stream.times_s[1:], strict=False)
            if before <= fault_s + 0.3 and after > fault_s
        ]
        if gaps and stream.times_s[0] < fault_s:
            found.append(max(gaps)[1] - fault_s)
    return sorted(found)
