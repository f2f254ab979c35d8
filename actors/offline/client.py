"""The calls of an embedded system: one per prompt, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import aiohttp
import orjson

T = TypeVar("T")
Job: TypeAlias = Callable[[], Awaitable[T]]


class Client:
    """Speaks to the system's ingress. Made and used on its loop."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self.api_key = api_key
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._session = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def close(self) -> None:
        await self._session.close()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer.

        Raises:
            ValueError: the request was refused; the text says why.
            RuntimeError: it could not be computed.
        """
        return orjson.loads(await self._posted(path, body))

    async def command(self, path: str, body: Mapping[str, Any]) -> None:
        """Like :meth:`post`, for routes whose answer only says that they are done."""
        await self._posted(path, body)

    async def _posted(self, path: str, body: Mapping[str, Any]) -> bytes:
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        async with self._session.post(self.url + path, data=data) as response:
            answer = await response.read()
            if response.status == 200:
                return answer
        error = orjson.loads(answer)["error"]
        raise (ValueError if response.status in (400, 404) else RuntimeError)(error["message"])

    async def get(self, path: str) -> Any:
        """The answer of a route that refuses no request."""
        async with self._session.get(self.url + path) as response:
            response.raise_for_status()
            return orjson.loads(await response.read())


async def run_all(jobs: Sequence[Job[T]], at_a_time: int, on_done: Callable[[int], object]) -> list[T]:
    """The results of all jobs in order. ``on_done`` is called with the number done so far. The first error cancels the
    rest; a note says whose it is."""
    results: list[Any] = [None] * len(jobs)
    numbers, done = iter(range(len(jobs))), 0

    async def work() -> None:
        nonlocal done
        for number in numbers:
            try:
                results[number] = await jobs[number]()
            except Exception as error:
                if len(jobs) > 1:
                    error.add_note(f"in prompt {number} (from 0) of {len(jobs)}")
                raise
            done += 1
            on_done(done)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_a_time, len(jobs))):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return results
