"""An OpenTelemetry collector: takes spans over HTTP as they come from any exporter, and keeps them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.helpers.waiting import LIMIT_S

HOPS = ("ingress", "tokenize", "queue", "prefill", "decode", "detokenize")


class Collector:
    """``spans`` as they came; ``status`` is what it answers. Exporters send at ``endpoint``."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.status = 200
        self.num_posts = 0
        self.endpoint = ""

    async def take(self, request: web.Request) -> web.Response:
        self.num_posts += 1
        assert request.content_type == "application/x-protobuf"
        told = ExportTraceServiceRequest.FromString(await request.read())
        if self.status == 200:
            for of_resource in told.resource_spans:
                self.resources.append(attributes(of_resource.resource))
                self.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
        return web.Response(status=self.status)

    async def traces(self, count: int = 1) -> list[dict[str, Span]]:
        """Wait for the spans of so many requests: by name, those of one request together."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.roots) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        found = []
        for root in self.roots:
            below = [span for span in self.spans if span.parent_span_id == root.span_id]
            names = [span.name for span in below]
            assert len(set(names)) == len(names)
            found.append({"llm_request": root, **{span.name: span for span in below}})
        return found

    @property
    def roots(self) -> list[Span]:
        return [span for span in self.spans if span.name == "llm_request"]


def attributes(of: Any) -> dict[str, Any]:
    """Plain values by name."""
    found: dict[str, Any] = {}
    for each in of.attributes:
        value = getattr(each.value, each.value.WhichOneof("value"))
        found[each.key] = [item.string_value for item in value.values] if hasattr(value, "values") else value
    return found


def check_hops(trace: dict[str, Span]) -> None:
    """Hops fill the time of their request without a gap, in order."""
    root, hops = trace["llm_request"], [trace[name] for name in HOPS if name in trace]
    by_trace = defaultdict(list)
    for span in trace.values():
        by_trace[span.trace_id].append(span)
    assert list(by_trace) == [root.trace_id]
    edges = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in hops)]
    assert [span.start_time_unix_nano for span in hops] == edges[:-1]
    assert edges == sorted(edges)
    assert edges[-1] == root.end_time_unix_nano


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """A collector that listens."""
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    try:
        yield collector
    finally:
        await runner.cleanup()
