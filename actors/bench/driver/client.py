"""The HTTP client of ``pagebus bench serve``: sends calls when they are due, and times every event of their streams.

    python -m pagebus.actors.bench.driver.client PART    (its spec and the time to start as JSON on standard input)

is one of several processes that share the work; it writes one line of JSON for each call that has ended.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import orjson
import uvloop

from pagebus.actors.bench.driver.load import Call, Spec, make_calls

ERROR_CHARACTERS = 300
DONE = b"[DONE]"


@dataclass(slots=True)
class Outcome:
    """What became of one call. Times are seconds of the wall clock; ``gaps_s`` lie between events with tokens."""

    number: int
    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    error: str = ""


async def run_calls(
    spec: Spec, calls: Sequence[Call], begin_s: float, on_outcome: Callable[[Outcome], object], concurrency: int
) -> None:
    """Send all calls, each at its time after ``begin_s`` (wall clock), at most ``concurrency`` (0: all) at a time."""
    limit = asyncio.Semaphore(concurrency) if concurrency else None
    timeout = aiohttp.ClientTimeout(total=spec.timeout_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    headers = {"Content-Type": "application/json", **spec.headers}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def one(call: Call) -> None:
            if limit is None:
                on_outcome(await send(session, spec.url, call))
                return
            async with limit:
                on_outcome(await send(session, spec.url, call))

        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                pause_s = begin_s + call.at_s - time.time()
                if pause_s > 0:
                    await asyncio.sleep(pause_s)
                tasks.create_task(one(call))


async def send(session: aiohttp.ClientSession, url: str, call: Call) -> Outcome:
    """Send one call and read its stream to the end."""
    outcome = Outcome(call.number, time.time())
    try:
        async with session.post(url, data=call.body) as response:
            if response.status != 200:
                text = await response.text()
                outcome.error = f"status {response.status}: {text[:ERROR_CHARACTERS]}"
                return outcome
            await _read(response.content, outcome)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
    return outcome


async def _read(content: aiohttp.StreamReader, outcome: Outcome) -> None:
    """Events as they come. Those that arrive together are counted as having come at once."""
    rest, done, num_events = b"", False, 0
    async for data in content.iter_any():
        now_s = time.time()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data: ")
            if payload == DONE:
                done = True
            elif payload and not payload.startswith(b":") and _take(orjson.loads(payload), outcome):
                num_events += 1
                if not outcome.first_s:
                    outcome.first_s = now_s
                else:
                    outcome.gaps_s.append(now_s - outcome.last_s)
                outcome.last_s = now_s
    outcome.output_tokens = outcome.output_tokens or num_events
    if not outcome.error and not done:
        outcome.error = "the stream ended without [DONE]"
    elif not outcome.error and not outcome.first_s:
        outcome.error = "the stream held no token"


def _take(chunk: dict[str, Any], outcome: Outcome) -> bool:
    """Note what an event says; returns whether it brings tokens: a text, or a higher count of them."""
    if "error" in chunk:
        outcome.error = str(chunk["error"])[:ERROR_CHARACTERS]
        return False
    grew = False
    usage = chunk.get("usage")
    if usage:
        grew = usage["completion_tokens"] > outcome.output_tokens
        outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    choices = chunk.get("choices")
    if not choices:
        return False
    choice = choices[0]
    delta = choice.get("delta") or choice
    return grew or bool(delta.get("text") or delta.get("content") or delta.get("reasoning_content"))


def main() -> None:
    """Run one process's part of the load."""
    job = orjson.loads(sys.stdin.buffer.read())
    spec, part = Spec(**job["spec"]), int(sys.argv[1])
    calls = make_calls(spec, part=part)
    share = share_of(spec.concurrency, part, spec.processes)

    def tell(outcome: Outcome) -> None:
        sys.stdout.buffer.write(orjson.dumps(asdict(outcome)) + b"\n")
        sys.stdout.buffer.flush()

    uvloop.run(run_calls(spec, calls, float(job["begin_s"]), tell, share))


def share_of(concurrency: int, part: int, parts: int) -> int:
    """How many of ``concurrency`` calls at a time are this part's. There are at least as many calls as parts, or there
    is no limit (0)."""
    return concurrency // parts + (part < concurrency % parts)


if __name__ == "__main__":
    main()
