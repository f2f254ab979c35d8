"""Requests gone wrong in every way we can think of, over real sockets, beside good streams.

``PAGEBUS_TEST_FUZZ=20000 PAGEBUS_TEST_FUZZ_SEED=1 python -m pytest tests/web/fuzz/test_wire_fuzz.py`` sends 20,000
others. A failure names the seed and the number of the request, from which :func:`mutations.make_case` makes it again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.helpers.waiting import TEST_LIMIT_S, until
from tests.web.fake_backend import SENTENCE
from tests.web.fuzz.mutations import BATCH, FILE, RESPONSE, Case, make_case

COUNT = int(os.environ.get("PAGEBUS_TEST_FUZZ", "300"))
SEED = int(os.environ.get("PAGEBUS_TEST_FUZZ_SEED", "0"))
STREAMS, WORKERS = 8, 32
NAMED = {"invalid_value", "invalid_type", "unknown_parameter", "unsupported_parameter"}
ENDS = (b"data: [DONE]", b"event: message_stop", b"event: response.completed", b"event: response.incomplete",
        b"event: response.failed", b"event: response.cancelled", b"event: error")  # fmt: skip
"""Of streams of all kinds."""


async def send(port: int, pieces: list[bytes]) -> bytes:
    """All that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        while data := await reader.read(2**16):
            answer += data
    except ConnectionError:
        pass  # closed while we still wrote: what was answered is what counts
    finally:
        writer.close()
    return answer


def check(case: Case, answer: bytes) -> int:
    """It is an answer, and says what is wrong; returns the status (0: none, which is all right for half a request)."""
    if not answer:
        assert not case.whole, "no answer"
        return 0
    head, _, body = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100 "):
        head, _, body = body.partition(b"\r\n\r\n")
    status = int(head.split(maxsplit=2)[1])
    assert 200 <= status < 500, f"status {status}"
    if b"text/event-stream" in head:
        assert any(end in body for end in ENDS)
        assert b"InternalServerError" not in body
    elif status >= 400 and case.method != b"HEAD":
        error = json.loads(body)["error"]
        assert list(error) == ["message", "type", "param", "code", "reason"]
        assert error["code"] == status
        assert 0 < len(error["message"]) < 1000
        if error["reason"] in NAMED:
            assert error["param"]
            assert error["message"].startswith(error["param"])
    return status


async def made(http, url: str) -> dict[bytes, bytes]:
    """A file, a batch and a response computed in the background, by what stands for their ids."""
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", line, filename="lines")

    async def new(path: str, **body: Any) -> str:
        async with http.post(f"{url}/v1/{path}", **body) as response:
            return (await response.json())["id"]

    file = await new("files", data=form)
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = await new("batches", json=wanted)
    response = await new("responses", json={"input": "x", "background": True})
    return {FILE.encode(): file.encode(), BATCH.encode(): batch.encode(), RESPONSE.encode(): response.encode()}


async def good_streams(port: int, done: asyncio.Event) -> int:
    """Streams one after another; how many were right, which is all of them."""
    body = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    count = 0
    while not done.is_set():
        answer = await send(port, [head + body])
        events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b'data: {"id"')]
        assert "".join(event["choices"][0]["text"] for event in events) == "".join(SENTENCE)
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        count += 1
    return count


@pytest.mark.timeout(TEST_LIMIT_S + COUNT)
async def test_requests_gone_wrong(serve, http, monkeypatch, tmp_path):
    """Every answer is a clean one, the good streams do not notice, and nothing is left over."""
    monkeypatch.setattr("pagebus.web.access.arrival.BODY_TIMEOUT_S", 3.0)
    monkeypatch.setattr("pagebus.web.http.connection.HEAD_TIMEOUT_S", 3.0)
    monkeypatch.setattr("pagebus.web.observatory.scheduler_queries.ANSWER_TIMEOUT_S", 60.0)
    lingering = web.RequestHandler.__init__.__kwdefaults__  # for the rest of a body, after the answer: 10 seconds
    monkeypatch.setitem(lingering, "lingering_time", 0.5)
    served = await serve(files_dir=str(tmp_path))
    ids = await made(http, served.url)
    port, done, numbers = served.actor.port, asyncio.Event(), iter(range(COUNT))
    statuses: Counter[int] = Counter()

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            case, pieces = make_case(SEED, number)
            for stand_in, there in ids.items():
                pieces = [piece.replace(stand_in, there) for piece in pieces]
            try:
                statuses[check(case, await send(port, pieces))] += 1
            except Exception as error:
                raise AssertionError(
                    f"request {number} of seed {SEED}: {error!r}\n{b''.join(pieces)[:2000]!r}"
                ) from error

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(good_streams(port, done)) for _ in range(STREAMS)]
        workers = [group.create_task(work(numbers)) for _ in range(WORKERS)]
        await asyncio.gather(*workers)
        done.set()

    assert all(stream.result() > 0 for stream in streams)
    assert statuses.total() == COUNT
    assert statuses[200] > COUNT / 10  # not everything is wrong with all of them
    assert statuses[400] > COUNT / 10
    context = served.actor.context
    await until(lambda: not served.actor._runner.server.connections)
    assert (context.inbox.num_open, context.admission.total.requests, context.admission.total.tokens) == (0, 0, 0)
    assert not context.bodies.num_bytes


def test_cases_can_be_made_again():
    """The same seed and number give the same bytes."""
    for number in range(50):
        assert make_case(3, number)[1] == make_case(3, number)[1]
