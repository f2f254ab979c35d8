"""``POST /v1/completions`` and ``POST /v1/chat/completions``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from msgspec import structs

from pagebus.bus.messages import GenerateRequest
from pagebus.web.access.admission import Charge, of_client
from pagebus.web.access.auth import API_KEY
from pagebus.web.answers.answer_schemas import CHAT as CHAT_ANSWER
from pagebus.web.answers.answer_schemas import COMPLETION as COMPLETION_ANSWER
from pagebus.web.answers.endpoint import Endpoint
from pagebus.web.answers.endpoints import CHAT, COMPLETION, make_chunks, set_details
from pagebus.web.answers.keep_alive import changes_of
from pagebus.web.answers.resume import RESUMPTION_HEADERS, Resumption, Seen, read_resumption
from pagebus.web.answers.returning import ReturningChunks
from pagebus.web.answers.sse import Chunks
from pagebus.web.answers.writing import EventStream, Writing
from pagebus.web.calls.call import Call
from pagebus.web.http.errors import ApiError, too_late
from pagebus.web.http.limits import LONG_ANSWER_NUMBERS, MANY_PROMPTS
from pagebus.web.http.naming import naming
from pagebus.web.http.offload import offload
from pagebus.web.pooling.tasks import check_task
from pagebus.web.requests.lengths import check_length, check_repeats, num_bytes
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.routes import EVENTS, JSON, About, Route
from pagebus.web.routes.generate import examples
from pagebus.web.server.context import (
    BUS_IDS,
    CONTEXT,
    REQUEST_ID,
    REQUEST_ID_GIVEN,
    Context,
    bus_request_ids,
    logged_as,
)


async def generate(
    request: web.Request,
    endpoint_of: Callable[[dict[str, Any]], Endpoint],
    *,
    before: Callable[[], Awaitable[None]] | None = None,
) -> web.StreamResponse:
    """Check for room, parse, submit, and answer whole or as a stream. ``endpoint_of`` finds the endpoint of a body;
    ``before`` is a further check, once that is known."""
    context = request.app[CONTEXT]
    context.check_ready()
    key = request[API_KEY]
    resumption = read_resumption(request.headers, key.name)
    returns = resumption.request_id if resumption is not None else ""
    context.admission.check_room(key, returns)

    def parse(data: dict[str, Any]) -> tuple[Endpoint, ParsedRequest]:
        endpoint = endpoint_of(data)
        return endpoint, of_client(endpoint.parse(data, context.model), key)

    endpoint, parsed = await context.bodies.read_as(request, parse)
    with naming(parsed.names):
        check_task(parsed, context.model)
        check_length(parsed, context.model, context.membership.max_prompt_chars)
        check_repeats(parsed)
    if before is not None:
        await before()
    if parsed.request_id is not None and not request[REQUEST_ID_GIVEN]:
        request[REQUEST_ID], request[REQUEST_ID_GIVEN] = parsed.request_id, True
    name = returns and endpoint.id_prefix + returns
    with context.admission.admitted(key, parsed, context.model, name) as charge:
        return await answer(request, endpoint, parsed, resumption, charge)


async def answer(
    request: web.Request, endpoint: Endpoint, parsed: ParsedRequest, resumption: Resumption | None, charge: Charge
) -> web.StreamResponse:
    """Submit the requests of a call and send its answer. Whatever still runs at the end is aborted."""
    context = request.app[CONTEXT]
    public_id, arrived_s = _public_id(request, endpoint, resumption), time.time()
    messages = await _messages(request, parsed, public_id, resumption, arrived_s)
    seen = None
    if resumption is not None:
        seen = resumption.seen_of(len(messages) * messages[0].sampling.n, streaming=parsed.stream)
    size = num_bytes(parsed, request.content_length)
    call = context.inbox.submit(messages, parsed.names_by_prompt, streaming=parsed.stream, num_bytes=size)
    request[BUS_IDS] = [message.request_id for message in messages]
    interval = max(parsed.stream_options.interval, context.settings.stream_interval)
    call.answer_as(public_id, interval=interval, tells_times=context.settings.enable_per_request_metrics)
    delivered = False
    try:
        with until_timeout(context, call, parsed.timeout_s):
            await asyncio.sleep(0)  # the outbox sends it
            set_details(call, parsed)
            response = await _respond(request, endpoint, parsed, call, seen, int(arrived_s))
        delivered = call.done
        return response
    finally:
        goes_on = context.inbox.close(call, delivered=delivered)
        charge.settle(sum(each.num_prompt_tokens + each.num_output_tokens for each in call.requests))
        charge.leave(delivered=delivered, stays_s=context.settings.resume_timeout_s * goes_on)


@contextmanager
def until_timeout(context: Context, call: Call, timeout_s: float | None) -> Iterator[None]:
    """Let a call take as long as its client has said, if it has."""
    if timeout_s is None:
        yield
        return
    loop = asyncio.get_running_loop()
    deadline = loop.call_later(timeout_s, context.inbox.end, call, too_late(timeout_s))
    try:
        yield
    finally:
        deadline.cancel()


def _public_id(request: web.Request, endpoint: Endpoint, resumption: Resumption | None) -> str:
    """The id of the answer: a resumed one keeps that of its first attempt."""
    return endpoint.id_prefix + (request[REQUEST_ID] if resumption is None else resumption.request_id)


async def _messages(
    request: web.Request, parsed: ParsedRequest, public_id: str, resumption: Resumption | None, arrived_s: float
) -> list[GenerateRequest]:
    """What goes on the bus: one message per prompt."""
    given = resumption is None and request[REQUEST_ID_GIVEN]
    ids = bus_request_ids(public_id, given=given, count=len(parsed.prompts))
    context = request.app[CONTEXT]
    adapter = context.model.adapter_of(parsed.model, pooled=bool(parsed.sampling.pooling))
    make = partial(parsed.messages_for_bus, ids, context.address, arrived_s, adapter)
    messages = await offload(make, long=len(ids) > MANY_PROMPTS)
    if resumption is None:
        return messages
    return [structs.replace(message, attempt=resumption.attempt, shared=True) for message in messages]


async def _respond(
    request: web.Request, endpoint: Endpoint, parsed: ParsedRequest, call: Call, seen: Seen | None, created_s: int
) -> web.StreamResponse:
    """Send the answer of a call, as a stream or whole. ``seen``: what a returning client has of it."""
    context, public_id = request.app[CONTEXT], call.public_id
    if parsed.stream:
        chunks = endpoint.translated(make_chunks(endpoint, parsed, public_id, created_s), public_id, parsed.model)
        if seen is not None:
            chunks = ReturningChunks(chunks, call.choices, seen)
        return await stream(request, context, call, chunks)
    await call.finished()
    write = partial(endpoint.response, call, public_id, created_s, parsed.model)
    is_long = num_numbers(call) > LONG_ANSWER_NUMBERS or len(call.choices) > MANY_PROMPTS
    whole = Writing(request, context.streams, await offload(write, long=is_long))
    try:
        return await whole.end()
    finally:
        whole.close()


def num_numbers(call: Call) -> int:
    """Approximate number of logprobs and token ids in an answer."""
    if (details := call.details) is None:
        return 0
    per_token = 1 + max(details.logprobs or 0, details.prompt_logprobs or 0)
    return per_token * sum(each.num_prompt_tokens + each.num_output_tokens for each in call.requests)


async def stream(request: web.Request, context: Context, call: Call, chunks: Chunks) -> web.StreamResponse:
    """Write chunks as text arrives. An error before the first chunk sets the status; after it, it is an event."""
    events = EventStream(request, context.streams)
    changes = changes_of(call, events, context.settings.sse_keep_alive_interval)
    try:
        while changed := await changes():
            data = chunks.of(changed)
            if call.done:
                return await events.end(data + chunks.last(call))
            if data:
                await events.write(data)
        return await events.end(chunks.last(call))
    except ApiError as error:
        if not events.opened:
            raise
        context.metrics.error(error.status)
        context.log.warning("stream failed", **logged_as(request), status=error.status, code=error.code)
        return await events.end(chunks.failed(error))
    finally:
        events.close()


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several.

    With `stream`, as server-sent events that end with `data: [DONE]`.
    """
    return await generate(request, lambda _: COMPLETION)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat.

    With `stream`, as server-sent events that end with `data: [DONE]`.
    """
    return await generate(request, lambda _: CHAT)


_ABOUT = About(tag="Generation", headers=RESUMPTION_HEADERS, answer_types=(JSON, EVENTS))
COMPLETIONS_ABOUT = replace(_ABOUT, parse=parse_completion, examples=examples.COMPLETIONS, answer=COMPLETION_ANSWER)
CHATS_ABOUT = replace(_ABOUT, parse=parse_chat, examples=examples.CHATS, answer=CHAT_ANSWER)
ROUTES = (
    Route("POST", "/v1/completions", "completions", completions, COMPLETIONS_ABOUT),
    Route("POST", "/v1/chat/completions", "chat_completions", chat_completions, CHATS_ABOUT),
)
