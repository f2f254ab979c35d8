"""Traces of jobs and batches: as those of requests over HTTP, below whatever span they were told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pagebus.actors.settings import Settings
from pagebus.bus.memory.bus import MemoryBus
from pagebus.bus.memory.server import MemoryServer
from pagebus.bus.messages import Job, RequestTimed
from pagebus.web.jobs.actor import JobsActor
from tests.helpers.otlp_collector import HOPS, Collector, attributes, check_hops, collecting
from tests.helpers.waiting import until
from tests.web.fake_backend import MODEL, Served, start_served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, LEFT_OUT = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
BODY = {"prompt": "one two", "max_tokens": 3}
LINE = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": BODY})


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """Gets spans a moment after they were made."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    async with collecting() as collector:
        yield collector


@pytest.fixture
async def world(collector: Collector, tmp_path: Path) -> AsyncIterator[tuple[Served, JobsActor]]:
    """An ingress and a jobs actor, which traces."""
    server = MemoryServer()
    served = await start_served(lambda: MemoryBus(server), files_dir=str(tmp_path))
    options = {"files_dir": str(tmp_path), "lease_ttl_s": 60.0, "otlp_traces_endpoint": collector.endpoint}
    actor = JobsActor(Settings(**options), MemoryBus(server), "jobs-0", model=MODEL)
    running = asyncio.create_task(actor.run())
    await until(lambda: actor.state == "ready")
    yield served, actor
    actor.request_drain()
    await running
    await actor.bus.close()
    await served.stop()


async def push(served: Served, *traceparents: str) -> None:
    bus, names = served.backend.bus, served.backend.names
    await bus.publish([(names.jobs, Job(request=LINE, traceparent=each)) for each in traceparents])
    await served.backend.requested(len(traceparents))


async def test_a_trace(world: tuple[Served, JobsActor], collector: Collector) -> None:
    """Has the hops and attributes of a request, and lies below the entry's span."""
    served, _ = world
    await push(served, SAMPLED)
    (request,) = served.backend.requests
    marks = ("taken_s", "tokenized_s", "started_s", "first_token_s", "ended_s")
    times = {name: request.arrived_s + 1e-6 * place for place, name in enumerate(marks, 1)}
    await served.backend.send(request.ingress, RequestTimed(request_id=request.request_id, **times))
    (trace,) = await collector.traces()
    root = trace["llm_request"]

    assert list(trace) == ["llm_request", *HOPS]
    check_hops(trace)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.kind == root.SPAN_KIND_CONSUMER
    told = attributes(root)
    assert told["gen_ai.request.id"] == request.request_id
    assert told["gen_ai.request.id"].startswith("cmpl-job-")
    assert (told["gen_ai.usage.prompt_tokens"], told["gen_ai.usage.completion_tokens"]) == (2, 3)


async def test_sampling(world: tuple[Served, JobsActor], collector: Collector) -> None:
    """What the sender leaves out is not traced; what says nothing sensible has a trace of its own."""
    served, actor = world
    await push(served, LEFT_OUT, "nonsense", "")
    actor.request_drain()  # which sends what is left
    await until(lambda: len(collector.roots) == 2)
    assert sorted(request.traced for request in served.backend.requests) == [False, True, True]
    assert all(not span.parent_span_id for span in collector.roots)
    assert len({span.trace_id for span in collector.roots}) == 2


async def test_a_batch(world: tuple[Served, JobsActor], collector: Collector) -> None:
    """Every line has a trace, below the span of who created the batch."""
    served, actor = world
    lines = "\n".join(LINE.replace('"a"', f'"{number}"') for number in range(3))
    async with aiohttp.ClientSession(served.url) as http:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", lines.encode(), filename="in.jsonl")
        async with http.post("/v1/files", data=form) as response:
            file_id = (await response.json())["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        async with http.post("/v1/batches", json=body, headers={"traceparent": SAMPLED}) as response:
            assert response.status == 200
    await served.backend.requested(3)
    actor.request_drain()
    await until(lambda: len(collector.roots) == 3)
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in collector.roots} == {(TRACE, PARENT)}
    assert len({attributes(span)["gen_ai.request.id"] for span in collector.roots}) == 3
