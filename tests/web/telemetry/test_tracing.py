"""Traces: what a collector of OpenTelemetry's gets of requests."""

from __future__ import annotations

import asyncio

import pytest

import pagebus.web.telemetry.tracing
from pagebus.actors.settings import Settings, SettingsError, otlp
from pagebus.bus.messages import RequestTimed
from pagebus.web.telemetry.tracing import hops_of
from tests.helpers.otlp_collector import HOPS, attributes, check_hops, collecting
from tests.helpers.waiting import until
from tests.web.fake_backend import Delta, batch

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "one two three", "max_tokens": 4, "n": 2, "temperature": 0.5, "top_p": 0.9}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Spans are sent a moment after they were made."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")


@pytest.fixture
async def collector():
    async with collecting() as collector:
        yield collector


def times_of(request, **changes):
    """What the scheduler tells: a microsecond a hop."""
    marks = ("taken_s", "tokenized_s", "started_s", "first_token_s", "ended_s")
    told = {name: request.arrived_s + 1e-6 * place for place, name in enumerate(marks, 1)}
    return RequestTimed(request_id=request.request_id, **{**told, **changes})


async def ask(http, served, path="/v1/completions", headers=None, **body):
    async with http.post(served.url + path, json=body or BODY, headers=headers) as response:
        return response.status, await response.text()


async def test_a_trace(collector, serve, http):
    """A span for the request below the client's own, one for each hop, and vLLM's names for what is known of it."""
    served = await serve(otlp_traces_endpoint=collector.endpoint)
    status, _ = await ask(http, served, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (request,) = served.backend.requests
    await served.backend.send(served.address, times_of(request, num_preemptions=1))
    (trace,) = await collector.traces()

    assert (status, request.traced) == (200, True)
    assert list(trace) == ["llm_request", *HOPS]
    check_hops(trace)
    root = trace["llm_request"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert root.kind == root.SPAN_KIND_SERVER
    told = attributes(root)
    latencies = {name: told.pop(name) for name in list(told) if name.startswith("gen_ai.latency.")}
    assert told == {
        "gen_ai.response.model": "fake-model",
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "pagebus.num_preemptions": 1,
    }
    names = "e2e time_to_first_token time_in_queue time_in_model_prefill time_in_model_decode time_in_model_inference"
    assert list(latencies) == [f"gen_ai.latency.{name}" for name in names.split()]
    assert latencies["gen_ai.latency.e2e"] >= latencies["gen_ai.latency.time_to_first_token"] > 0
    assert latencies["gen_ai.latency.time_in_model_inference"] == pytest.approx(2e-6, abs=1e-6)
    assert collector.resources[0]["service.name"] == "pagebus"


@pytest.mark.parametrize("traceparent", [f"00-{TRACE}-{PARENT}-00", None, "nonsense"])
async def test_sampling(collector, serve, http, traceparent):
    """What the client does not sample is not traced, and costs nothing; without a word of it, all is."""
    served = await serve(otlp_traces_endpoint=collector.endpoint)
    await ask(http, served, headers={"traceparent": traceparent} if traceparent else {})
    await served.stop()
    sampled = traceparent != f"00-{TRACE}-{PARENT}-00"
    assert [request.traced for request in served.backend.requests] == [sampled]
    assert [span.name for span in collector.spans] == ["llm_request"] * sampled
    assert all(not span.parent_span_id for span in collector.roots)


async def test_every_route_that_generates(collector, serve, http):
    """Each prompt of a call has its trace; what only tells tokens has none."""
    served = await serve(otlp_traces_endpoint=collector.endpoint)
    chat = [{"role": "user", "content": "hi"}]
    await ask(http, served, prompt=["a", "b"], max_tokens=1)
    await ask(http, served, "/v1/chat/completions", messages=chat, stream=True)
    await ask(http, served, "/v1/embeddings", input="a")
    await ask(http, served, "/v1/responses", input="a")
    await ask(http, served, "/v1/messages", messages=chat, max_tokens=2)
    await ask(http, served, "/tokenize", prompt="a")
    await served.stop()
    ids = [attributes(root)["gen_ai.request.id"] for root in collector.roots]
    assert sorted(ids) == sorted(request.request_id for request in served.backend.requests if request.traced)
    assert [request.traced for request in served.backend.requests] == [True] * 6 + [False]


async def test_a_client_that_goes_away(collector, serve, http):
    """The hop that its request was in ends with it."""
    served = await serve(otlp_traces_endpoint=collector.endpoint, answers=False)
    asking = asyncio.create_task(ask(http, served))
    (request,) = await served.backend.requested()
    asking.cancel()
    await served.backend.aborted()
    await served.backend.send(served.address, times_of(request, first_token_s=0.0, ended_s=0.0))
    (trace,) = await collector.traces()
    assert list(trace) == ["llm_request", *HOPS[:4]]
    check_hops(trace)
    assert attributes(trace["llm_request"])["gen_ai.response.finish_reasons"] == ["abort", "abort"]


async def test_a_request_that_fails(collector, serve, http):
    """Its span says so; and no times come, as the tokenizer has refused it."""
    served = await serve(otlp_traces_endpoint=collector.endpoint)
    status, _ = await ask(http, served, prompt="word " * 600)
    await served.stop()
    (root,) = collector.roots
    assert (status, root.status.code) == (400, root.status.STATUS_CODE_ERROR)
    assert attributes(root)["error.type"] == "context_length_exceeded"


async def test_times_that_never_come(collector, serve, http, monkeypatch):
    """A scheduler was killed at the wrong moment: a trace without hops; and times that come too late disturb nobody."""
    monkeypatch.setattr(pagebus.web.telemetry.tracing, "TIMES_S", 0.0)
    served = await serve(otlp_traces_endpoint=collector.endpoint)
    await ask(http, served)
    (trace,) = await collector.traces()
    assert list(trace) == ["llm_request"]
    (request,) = served.backend.requests
    await served.backend.send(served.address, times_of(request), batch([Delta("nobody", "", 1)]))
    assert (await ask(http, served))[0] == 200


async def test_a_collector_that_takes_nothing(collector, serve, http, lines):
    """One line in the log, whatever is lost, and one when it is over; answers are not touched."""
    served = await serve(otlp_traces_endpoint=collector.endpoint)
    for status, wanted in ((400, 2), (200, 3)):
        collector.status = status
        while collector.num_posts < wanted:
            assert (await ask(http, served))[0] == 200
            await served.backend.send(served.address, times_of(served.backend.requests[-1]))
            posts = collector.num_posts
            await until(lambda posts=posts: collector.num_posts > posts)
    await served.stop()
    told = [line["event"] for line in lines()]
    assert [told.count(event) for event in ("traces are lost", "traces are exported again")] == [1, 1]
    assert "opentelemetry" not in "".join(map(str, lines()))


async def test_nothing_is_traced_by_default(serve, http):
    """Not even if the client asks for it."""
    served = await serve()
    assert (await ask(http, served, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"}))[0] == 200
    assert [request.traced for request in served.backend.requests] == [False]


@pytest.mark.parametrize(
    ("known", "ends"),
    [
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 9)),
        ((1, 2, 3, 0, 5), (1, 2, 3, 5, 5, 9)),  # another scheduler went on after the first token
        ((0, 0, 0, 0, 0), (9,)),
        ((1, 2, 0, 0, 0), (1, 2, 9)),
        ((3, 2, 1, 11, 12), (3, 3, 3, 9, 9, 9)),  # clocks that differ
    ],
)
def test_hops(known, ends):
    """They follow one another, and end where it is known that they did."""
    marks = dict(zip(("taken_s", "tokenized_s", "started_s", "first_token_s", "ended_s"), known, strict=True))
    hops = hops_of(RequestTimed(request_id="r", **marks), 0.5, 9.0)
    assert [(name, end) for name, _, end in hops] == list(zip(HOPS, ends, strict=False))
    assert [begin for _, begin, _ in hops] == [0.5, *ends[:-1]]


@pytest.mark.parametrize(
    ("endpoint", "protocol", "missing", "problem"),
    [
        ("127.0.0.1:4318", "", "", "needs a URL, like http://127.0.0.1:4318/v1/traces"),
        ("http://h/v1/traces", "carrier-pigeon", "", "choose one of http/protobuf, grpc"),
        ("http://h:4317", "grpc", "grpc", "pip install 'opentelemetry-exporter-otlp-proto-grpc'"),
        ("http://h/v1/traces", "", "opentelemetry.sdk", "pip install 'pagebus[otel]'"),
        ("http://h/v1/traces", "http/protobuf", "proto.http", "pip install 'pagebus[otel]'"),
    ],
)
def test_a_start_that_is_refused(monkeypatch, endpoint, protocol, missing, problem):
    """It says what to install or to write instead, before anything is started."""
    find = otlp.find_spec
    monkeypatch.setattr(otlp, "find_spec", lambda name: None if missing and missing in name else find(name))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(SettingsError, match="--otlp-traces-endpoint") as caught:
        Settings(otlp_traces_endpoint=endpoint)
    assert problem in str(caught.value)
