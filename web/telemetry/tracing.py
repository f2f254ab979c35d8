"""OpenTelemetry traces of requests: a span per request, and below it a span per hop.

The span of a request begins when it is sent. Its parent is the client's span named by ``traceparent``, whose sampling
decision applies. When the scheduler is done with the request it sends the times of the hops
(:class:`~pagebus.bus.messages.RequestTimed`). Only then are the spans made, and a thread of OpenTelemetry exports them.
If these times do not arrive in time, because the message was lost or the request never reached the scheduler, the trace
has no hops.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass

from msgspec.structs import replace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagebus.actors.runtime.actor import describe
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.messages import GenerateRequest, RequestTimed
from pagebus.web.calls.call import Call, OpenRequest
from pagebus.web.http.errors import ApiError

_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("headers")
"""The trace headers of the HTTP request, or job, that the current task answers."""
HOPS = ("ingress", "tokenize", "queue", "prefill", "decode", "detokenize")
"""Each ends when the next one begins: taken up, tokenized, started, first token, last token, with the ingress."""
TIMES_S = 5.0
"""Seconds to wait for the times of a finished request."""
SHUTDOWN_S = 3.0
"""Seconds within which the last spans must be exported at shutdown."""


@dataclass(slots=True, eq=False)
class Trace:
    """A request that is traced. ``closed_s``: when its handler was done with it; 0: it is not."""

    span: Span
    sent: GenerateRequest
    opened: OpenRequest
    closed_s: float = 0.0
    failure: ApiError | None = None
    times: RequestTimed | None = None

    @property
    def end_s(self) -> float:
        """When its last text came, or it was given up."""
        finished_s = self.opened.finished_s
        return self.sent.arrived_s + finished_s - self.opened.started_s if finished_s else self.closed_s


class Tracing:
    """All traces of one ingress or jobs actor that are not handed over yet. ``kind`` is that of the spans of requests;
    ``clock`` gives seconds since 1970."""

    def __init__(
        self,
        exporter: SpanExporter,
        model: str,
        version: str,
        log: Log,
        kind: SpanKind,
        clock: Callable[[], float] = time.time,
    ) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what it says of failures is said below
        resource = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "pagebus")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Watched(exporter, log)))
        self._tracer = self._provider.get_tracer("pagebus", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._kind = kind
        self._clock = clock
        self._traces: dict[str, Trace] = {}

    def arriving(self, headers: Mapping[str, str]) -> None:
        """What the present task does from now on, and tasks that it begins, is for who sent these headers."""
        _HEADERS.set(headers)

    def begin(self, request: GenerateRequest, opened: OpenRequest) -> GenerateRequest:
        """The request as it is to be sent: if it is sampled, the scheduler has to tell its times."""
        parent = self._propagator.extract(_HEADERS.get({}))
        start = _ns(request.arrived_s)
        span = self._tracer.start_span("llm_request", parent, self._kind, start_time=start)
        if not span.is_recording():
            return request
        if (other := self._traces.pop(request.request_id, None)) is not None:
            self._hand_over(other)
        request = replace(request, traced=True)
        self._traces[request.request_id] = Trace(span, request, opened)
        return request

    def closed(self, call: Call) -> None:
        """The handler is done with the call."""
        for request in call.requests:
            trace = self._traces.get(request.request_id)
            if trace is not None and trace.opened is request:
                trace.closed_s, trace.failure = self._clock(), call.failure
                if trace.times is not None:
                    self._hand_over(self._traces.pop(request.request_id))

    def timed(self, times: RequestTimed) -> None:
        """What happened when, of a request that the scheduler is done with."""
        if (trace := self._traces.get(times.request_id)) is not None:
            trace.times = times
            if trace.closed_s:
                self._hand_over(self._traces.pop(times.request_id))

    def tick(self) -> None:
        """Call this now and then: nobody waits for times for ever."""
        late_s = self._clock() - TIMES_S
        for request_id, trace in list(self._traces.items()):
            if 0 < trace.closed_s < late_s:
                self._hand_over(self._traces.pop(request_id))

    async def stop(self) -> None:
        """Hand over what there is. A collector that takes nothing is not waited for."""
        while self._traces:
            self._hand_over(self._traces.popitem()[1])
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(stopped.set)

        threading.Thread(target=shut_down, daemon=True).start()
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), SHUTDOWN_S)

    def _hand_over(self, trace: Trace) -> None:
        """Make the spans and end them."""
        trace.closed_s = trace.closed_s or self._clock()
        span, times, end_s = trace.span, trace.times, trace.end_s
        for name, value in attributes_of(trace, self._model).items():
            span.set_attribute(name, value)
        if trace.failure is not None:
            span.set_attribute("error.type", trace.failure.code or str(trace.failure.status))
            span.set_status(StatusCode.ERROR)
        if times is not None:
            around = set_span_in_context(span)
            for hop, from_s, to_s in hops_of(times, trace.sent.arrived_s, end_s):
                self._tracer.start_span(hop, around, start_time=_ns(from_s)).end(_ns(to_s))
        span.end(_ns(end_s))


def hops_of(times: RequestTimed, arrived_s: float, end_s: float) -> list[tuple[str, float, float]]:
    """Name, begin and end of each hop until the end. Clocks of two machines may differ: no hop ends before it began.
    Of what is not known when it ended (a scheduler was replaced meanwhile) that is when the next one did."""
    marks = [times.taken_s, times.tokenized_s, times.started_s, times.first_token_s, times.ended_s, end_s]
    hops = []
    for place, hop in enumerate(HOPS):
        known = [mark_s for mark_s in marks[place:] if mark_s]
        until_s = min(max(known[0], arrived_s), end_s)
        hops.append((hop, arrived_s, until_s))
        if len(known) == 1:
            break
        arrived_s = until_s
    return hops


def attributes_of(trace: Trace, model: str) -> dict[str, str | int | float | Sequence[str]]:
    """What the span of a request says, by vLLM's names."""
    sampling, opened, times = trace.sent.sampling, trace.opened, trace.times
    first_s = min((each.first_token_s for each in opened.choices if each.first_token_s), default=0.0)
    said: dict[str, str | int | float | Sequence[str] | None] = {
        "gen_ai.response.model": model,
        "gen_ai.request.id": trace.sent.request_id,
        "gen_ai.request.n": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": opened.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(choice.num_tokens for choice in opened.choices),
        "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in opened.choices],
        "gen_ai.latency.e2e": trace.end_s - trace.sent.arrived_s,
        "gen_ai.latency.time_to_first_token": first_s - opened.started_s if first_s else None,
    }
    if times is not None:
        for name, from_s, to_s in (
            ("time_in_queue", times.tokenized_s, times.started_s),
            ("time_in_model_prefill", times.started_s, times.first_token_s),
            ("time_in_model_decode", times.first_token_s, times.ended_s),
            ("time_in_model_inference", times.started_s, times.ended_s),
        ):
            said[f"gen_ai.latency.{name}"] = max(0.0, to_s - from_s) if from_s and to_s else None
        said["pagebus.num_preemptions"] = times.num_preemptions
    return {name: value for name, value in said.items() if value is not None}


class _Watched(SpanExporter):
    """An exporter whose failures are logged when they begin, and when they are over."""

    def __init__(self, exporter: SpanExporter, log: Log) -> None:
        self._exporter = exporter
        self._log = log
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        problem = "the collector does not take them"
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            result, problem = SpanExportResult.FAILURE, describe(error)
        failing = result is not SpanExportResult.SUCCESS
        if failing and not self._failing:
            self._log.warning("traces are lost", error=problem)
        elif self._failing and not failing:
            self._log.info("traces are exported again")
        self._failing = failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
