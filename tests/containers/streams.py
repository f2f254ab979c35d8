"""Twenty streams that are all under way when something happens, and must end with exactly their tokens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from tests.chaos.load import Answer, Job, Load, difference
from tests.helpers.waiting import until

COUNT = 20
MODEL = "oracle"


def make_load(url: str, *, model: str = MODEL, tokens: int = 300) -> Load:
    """Streams of ``tokens`` tokens each: greedy and sampled, chats and completions."""
    jobs = []
    for index in range(COUNT):
        body: dict[str, Any] = {"model": model, "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
        text = f"question {index} of twenty"
        if index % 3:
            jobs.append(Job("/v1/completions", {**body, "prompt": text}))
        else:
            jobs.append(Job("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}))
    return Load(url, jobs)


async def during(load: Load, happening: Callable[[], Awaitable[object]], *, keyed: bool = False) -> list[Answer]:
    """Ask for all streams; once each has begun and none has ended, let it happen; the answers, in order.

    Clients with a key come back when their connection breaks.
    """
    load.streams.clear()
    keys = [uuid.uuid4().hex if keyed else None for _ in load.jobs]
    async with load.session() as session:
        asking = (load.ask(session, job, key=key, streamed=True) for job, key in zip(load.jobs, keys, strict=True))
        tasks = [asyncio.create_task(each) for each in asking]
        try:
            await until(lambda: len(load.streams) == COUNT and all(stream.times_s for stream in load.streams))
            assert not any(task.done() for task in tasks), "a stream is over before anything has happened"
            await happening()
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def problems(load: Load, answers: list[Answer]) -> list[str]:
    """What is wrong with answers that should be those of a run without faults."""
    pairs = zip(load.expected, answers, strict=True)
    return [difference(want, answer.told()) for want, answer in pairs if answer.told() != want]
