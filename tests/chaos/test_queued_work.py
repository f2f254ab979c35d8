"""Work that nobody waits for, batches and background responses, while everything that does it dies: `make chaos`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.chaos.deployment import KINDS, Deployment, deployed
from tests.chaos.load import Answer, Load, make_jobs
from tests.chaos.structured import structured

LINES = 2000
DEATHS = 10
SHARE = LINES // (2 * DEATHS)
"""Lines answered between two deaths, so that half of them are when the batch is cancelled."""
RESPONSES = 12
LOOK_S = 0.2

pytestmark = [
    pytest.mark.skipif(os.environ.get("PAGEBUS_TEST_CHAOS") != "full", reason="part of `make chaos` only"),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One actor of each kind, and a folder for files."""
    folder = tmp_path_factory.mktemp("queued")
    with deployed(folder, "--files-dir", str(folder / "files"), step_ms=5) as started:
        yield started
        assert started.stop() == 0, started.log()


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    """As people use it: it tries again what has broken off."""
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="x", max_retries=10) as made:
        yield made


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Look again and again; the test has a time limit."""
    while True:
        if await condition():
            return
        await asyncio.sleep(LOOK_S)


async def die(deployment: Deployment) -> None:
    """SIGKILL for all six actors and Redis."""
    deployment.kill(*KINDS)
    deployment.kill_redis()
    await asyncio.to_thread(deployment.start_redis)
    await asyncio.to_thread(deployment.until_healthy)


async def test_a_batch_is_cancelled_while_all_die(
    deployment: Deployment, client: openai.AsyncOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten times everything is killed, and half way the batch is cancelled: every line is in one of the two files once,
    with its right answer or as cancelled."""
    load = Load(
        deployment.url, structured([job for job in make_jobs(48, seed=3, most_tokens=24) if "prompt" in job.body])
    )
    await load.learn()
    jobs = {f"{index}": index % len(load.jobs) for index in range(LINES)}
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(line_of(custom_id, load, place) for custom_id, place in jobs.items()))
    with path.open("rb") as file:
        uploaded = await client.files.create(file=file, purpose="batch")
    batch = await client.batches.create(input_file_id=uploaded.id, endpoint="/v1/completions", completion_window="24h")

    async def completed() -> int:
        counts = (await client.batches.retrieve(batch.id)).request_counts
        return 0 if counts is None else counts.completed

    for death in range(1, DEATHS + 1):

        async def far_enough(least: int = death * SHARE) -> bool:
            return await completed() >= least

        await until(far_enough)
        if death == DEATHS:
            await client.batches.cancel(batch.id)
        await die(deployment)

    async def ended() -> bool:
        return (await client.batches.retrieve(batch.id)).status == "cancelled"

    await until(ended)
    batch = await client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    output = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
    errors = [json.loads(line) for line in (await client.files.content(batch.error_file_id)).text.splitlines()]
    assert sorted(line["custom_id"] for line in output + errors) == sorted(jobs)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert len(output) >= LINES // 2
    for line in output:
        assert told(line) == load.expected[jobs[line["custom_id"]]]
    with capsys.disabled():
        print(f"\nall died {DEATHS} times: {len(output)} of {LINES} lines answered, {len(errors)} cancelled")
    assert await deployment.until_at_rest() == []


def line_of(custom_id: str, load: Load, place: int) -> str:
    job = load.jobs[place]
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": job.path, "body": job.body}) + "\n"


def told(line: dict[str, Any]) -> dict[int, tuple[Any, ...]]:
    """What a line of the output says, as clients compare it."""
    answer = Answer()
    answer.add_all(line["response"]["body"])
    return answer.told()


async def test_background_responses_outlive_all(deployment: Deployment, client: openai.AsyncOpenAI) -> None:
    """The ingress is killed, then everything: each response is what it would have been, its events are numbered without
    a gap, and who reads them on from where the connection broke misses nothing."""
    asked = [f"Tell me of {place} dogs." for place in range(RESPONSES)]
    options: dict[str, Any] = {"model": "oracle", "temperature": 0, "max_output_tokens": 600}
    whole = await asyncio.gather(*(client.responses.create(input=each, store=False, **options) for each in asked))
    queued = await asyncio.gather(*(client.responses.create(input=each, background=True, **options) for each in asked))
    readers = [asyncio.create_task(read_events(client, response.id)) for response in queued]
    await asyncio.sleep(1)
    deployment.kill("ingress")
    await asyncio.sleep(3)
    await die(deployment)
    for reader, response, expected in zip(readers, queued, whole, strict=True):
        events = await reader
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == expected.output_text
        ended = await client.responses.retrieve(response.id)
        assert (ended.output_text, ended.status) == (expected.output_text, expected.status)
        assert ended.usage is not None
        assert expected.usage is not None
        assert ended.usage.output_tokens == expected.usage.output_tokens
    assert await deployment.until_at_rest() == []


async def read_events(client: openai.AsyncOpenAI, response_id: str) -> list[Any]:
    """All of them, over as many connections as it takes."""
    events: list[Any] = []
    while not events or events[-1].type not in ("response.completed", "response.incomplete"):
        after = events[-1].sequence_number if events else -1
        try:
            async with await client.responses.retrieve(response_id, stream=True, starting_after=after) as stream:
                async for event in stream:
                    events.append(event)
        except (openai.APIError, httpx.HTTPError):
            await asyncio.sleep(LOOK_S)
    return events
