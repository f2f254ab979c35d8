"""``/v1/responses``: OpenAI's newer API, on the chat path.

Responses are stored, and computed in the background on request.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from pagebus.web.access.admission import of_client
from pagebus.web.access.auth import API_KEY
from pagebus.web.adapters.response_events import OVER, ResponseEvents, new_response
from pagebus.web.adapters.response_input import (
    INCLUDES,
    Parse,
    Wanted,
    parse_count,
    parse_kept,
    parse_response,
    read_response,
)
from pagebus.web.adapters.translated import TranslatedChunks, named, written
from pagebus.web.answers.answer_schemas import COUNT, OBJECT, TEXT, TIME, array, record
from pagebus.web.answers.endpoints import CHAT, make_chunks, set_details
from pagebus.web.answers.keep_alive import with_comments
from pagebus.web.answers.resume import Had, Place
from pagebus.web.answers.returning import CatchUp
from pagebus.web.answers.writing import EventStream
from pagebus.web.calls.call import Call
from pagebus.web.http.errors import ASKED_ELSEWHERE, ApiError, bad_field, not_supported
from pagebus.web.http.limits import LONG_BODY_BYTES
from pagebus.web.http.naming import naming
from pagebus.web.http.offload import offload
from pagebus.web.http.queries import limit_of, switch
from pagebus.web.pooling.tasks import check_task
from pagebus.web.requests.lengths import check_length, num_bytes
from pagebus.web.requests.openai import parse_chat, parse_prompt
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.routes import EVENTS, JSON, About, Route, json_response
from pagebus.web.routes.generate import examples
from pagebus.web.routes.generate.generation import until_timeout
from pagebus.web.routes.generate.tokens import ask_tokenizer
from pagebus.web.server.context import BUS_IDS, CONTEXT, Context
from pagebus.web.storage.files import page
from pagebus.web.storage.responses import Piece, Record
from pagebus.web.storage.responses import num_bytes as json_bytes

MAX_ID_CHARS = 100
MAX_PAGE = 100


async def create(request: web.Request) -> web.StreamResponse:
    """Answer an input, optionally after a previous response, optionally in the background.

    With `stream`, as named events with sequence numbers. A background response can be read from any number on.
    """
    context, key = request.app[CONTEXT], request[API_KEY]
    context.check_ready()
    context.admission.check_room(key)
    wanted, kept, parsed = await _read(request, parse_chat)
    with naming(parsed.names):
        check_task(parsed, context.model)
        check_length(parsed, context.model, context.membership.max_prompt_chars)
    sampled = {"temperature": parsed.sampling.temperature, "top_p": parsed.sampling.top_p}
    events = ResponseEvents(new_response(f"resp_{uuid.uuid4().hex}", parsed.model, wanted.shown | sampled))
    request[BUS_IDS] = [events.response["id"]]
    with context.admission.admitted(key, parsed, context.model) as charge:
        if wanted.background:
            charge.settle(0)  # charged where it is computed; this only checked for room
            record = {**kept, "response": events.response}
            await context.responses.reserve(record, parsed.sampling.max_tokens)
            await context.responses.queue(record)
        else:
            try:
                return await _in_foreground(request, wanted, parsed, events, kept)
            finally:
                charge.settle(used_tokens(events))
    if wanted.stream:
        return await stream(request, context.responses.events(events.response["id"], -1))
    return json_response({**events.response, "status": "queued"})


async def count_input(request: web.Request) -> web.Response:
    """Count the tokens of an input, as a response to it would have them in its prompt."""
    request.app[CONTEXT].check_ready()
    _, _, parsed = await _read(request, parse_prompt)
    with naming(parsed.names):
        prompt, _ = await ask_tokenizer(request, parsed)
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.tokens)})


async def _read(request: web.Request, parse_body: Parse) -> tuple[Wanted, Record, ParsedRequest]:
    """The body, what is kept of it behind the response that it continues, and the chat that this becomes."""
    context, key = request.app[CONTEXT], request[API_KEY]
    allow_unknown = context.model.allow_unknown_fields
    wanted = await context.bodies.read_as(request, lambda data: read_response(data, allow_unknown=allow_unknown))
    before: list[dict[str, Any]] = []
    if wanted.previous is not None:
        before = (await find(context, wanted.previous, key.name, "previous_response_id"))["messages"]
    kept: Record = {**wanted.kept(before), "owner": key.name}
    size = request.content_length
    if before and (size := json_bytes(kept["messages"])) > context.bodies.max_bytes:
        raise bad_field("previous_response_id", f"a conversation may have at most {context.bodies.max_bytes} bytes")
    parse = partial(parse_kept, kept, context.model, parse_body)
    return wanted, kept, of_client(await offload(parse, long=size is None or size > LONG_BODY_BYTES), key)


async def _in_foreground(
    request: web.Request, wanted: Wanted, parsed: ParsedRequest, events: ResponseEvents, kept: Record
) -> web.StreamResponse:
    """Compute while the client waits. The response is stored before the client gets its end."""
    context = request.app[CONTEXT]

    async def told() -> AsyncGenerator[bytes, None]:
        async with aclosing(computed(context, parsed, events)) as pieces:
            async for piece in pieces:
                if events.is_over and wanted.store:
                    shown = {name: kept[name] for name in ("items", "messages", "owner")}
                    messages = [*kept["messages"], *events.messages()]
                    await context.responses.keep({**shown, "messages": messages, "response": events.response})
                yield piece.events

    if wanted.stream:
        return await stream(request, told())
    async for _ in told():
        pass
    return json_response(events.response)


def used_tokens(events: ResponseEvents) -> int | None:
    """Tokens that a response used; None: it has not ended."""
    usage = events.response.get("usage") or {}
    return usage.get("total_tokens")


async def computed(
    context: Context,
    parsed: ParsedRequest,
    events: ResponseEvents,
    *,
    attempt: str = "",
    seen: tuple[int, int] = (0, 0),
) -> AsyncGenerator[Piece, None]:
    """The events of a response as it is computed. One with an ``attempt`` is joined where it is, and goes on after what
    was ``seen`` of it (tokens, characters); the scheduler keeps it until the last piece has been taken.

    Raises:
        ApiError: it was refused, before there was any event, and its client waits for it; or another attempt goes on.
    """
    response_id = events.response["id"]
    adapter = context.model.adapter_of(parsed.model)
    (message,) = parsed.messages_for_bus([response_id], context.address, time.time(), adapter)
    size = num_bytes(parsed, None)
    requests = [replace(message, attempt=attempt)]
    call = context.inbox.submit(requests, parsed.names_by_prompt, streaming=True, num_bytes=size)
    call.answer_as(response_id, interval=context.settings.stream_interval, tells_times=False)
    delivered = False
    try:
        async with aclosing(_pieces(context, call, parsed, events, seen)) as pieces:
            async for piece in pieces:
                yield piece
        delivered = True
    except ApiError:
        delivered = True
        raise
    finally:
        context.inbox.close(call, delivered=delivered)


async def _pieces(
    context: Context, call: Call, parsed: ParsedRequest, events: ResponseEvents, seen: tuple[int, int]
) -> AsyncGenerator[Piece, None]:
    (choice,), response_id = call.choices, events.response["id"]
    chat = make_chunks(CHAT, parsed, response_id, events.response["created_at"])
    chunks = TranslatedChunks(chat, events, lambda _: b"")
    catch_up = CatchUp(call.choices, [Had(Place(*seen))], lambda choice: chat.of([choice]))
    told = b""
    try:
        set_details(call, parsed)
        with until_timeout(context, call, parsed.timeout_s):
            while changed := await call.changes():
                told = b"" if events.begun else written(events.begin())
                if not catch_up.waits(choice):
                    catch_up.pass_over(choice)
                    told += chunks.of(changed)
                if call.done:
                    break
                if told:
                    yield Piece(told, (choice.num_tokens, choice.num_chars))
                    told = b""
        told += chunks.last(call)
    except ApiError as error:
        if not events.begun or (call.resumable and error.code == ASKED_ELSEWHERE):
            raise
        cancelled = call.resumable and await context.responses.is_cancelled(response_id)
        told = written(events.failed(error, "cancelled" if cancelled else "failed"))
    yield Piece(told, (choice.num_tokens, choice.num_chars))


async def stream(request: web.Request, told: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Write events as they come. ``told`` is closed with the stream."""
    context = request.app[CONTEXT]
    events = EventStream(request, context.streams)
    try:
        async with aclosing(with_comments(told, context.settings.sse_keep_alive_interval)) as coming:
            async for data in coming:
                await events.write(data)
        return await events.end(b"")
    except ApiError as error:
        if not events.opened:
            raise
        context.metrics.error(error.status)
        problem = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": 0}
        return await events.end(named({"type": "error", **problem}))
    finally:
        events.close()


async def find(context: Context, response_id: str, owner: str, param: str = "response_id") -> Record:
    found = await context.responses.find(response_id, owner) if len(response_id) <= MAX_ID_CHARS else None
    if found is None:
        kept_s = context.settings.response_ttl_s
        text = f"Response with id '{response_id[:MAX_ID_CHARS]}' not found. Responses are kept for {kept_s:g} s."
        raise ApiError(404, text, param=param, code="response_not_found")
    response = found["response"]
    if response["background"] and await context.responses.is_cancelled(response_id):
        response["status"] = "cancelled"  # as its client was told: what computes it may not know yet, or be faster
    return found


async def retrieve(request: web.Request) -> web.StreamResponse:
    """A stored response; with `stream`, the events of a background response after `starting_after`."""
    context, response_id = request.app[CONTEXT], request.match_info["response_id"]
    check_includes(request)
    if switch(request.query, "include_obfuscation"):
        raise not_supported("include_obfuscation")
    streams = switch(request.query, "stream")
    found = await find(context, response_id, request[API_KEY].name)
    if not streams:
        return json_response(found["response"])
    after = request.query.get("starting_after", "-1")
    if not re.fullmatch(r"-?[0-9]{1,9}", after):
        raise bad_field("starting_after", "must be the sequence number of an event")
    if not found["response"]["background"]:
        raise bad_field("stream", "only a response that was created with background can be streamed again")
    return await stream(request, context.responses.events(response_id, int(after)))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a background response."""
    context, response_id = request.app[CONTEXT], request.match_info["response_id"]
    found = await find(context, response_id, request[API_KEY].name)
    if not found["response"]["background"]:
        raise bad_field("response_id", "only a response that was created with background can be cancelled")
    if found["response"]["status"] not in OVER:
        await context.responses.cancel(response_id)
        context.inbox.cancel(response_id)
        found["response"]["status"] = "cancelled"
    return json_response(found["response"])


async def delete(request: web.Request) -> web.Response:
    """Delete a response."""
    context, response_id = request.app[CONTEXT], request.match_info["response_id"]
    found = await find(context, response_id, request[API_KEY].name)
    await context.responses.delete(found)
    if found["response"]["status"] not in OVER:
        context.inbox.cancel(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def input_items(request: web.Request) -> web.Response:
    """The input of a response, the newest item first unless `order` is asc."""
    check_includes(request)
    order, limit = request.query.get("order", "desc"), limit_of(request.query, 20, MAX_PAGE)
    if order not in ("asc", "desc"):
        raise bad_field("order", "must be asc or desc")
    found = await find(request.app[CONTEXT], request.match_info["response_id"], request[API_KEY].name)
    items = found["items"] if order == "asc" else found["items"][::-1]
    return json_response(page(items, request.query.get("after"), limit))


def check_includes(request: web.Request) -> None:
    """Check ``include``: supported values are always included, others are rejected."""
    for name in ("include", "include[]"):
        if any(each not in INCLUDES for each in request.query.getall(name, [])):
            raise bad_field("include", f"must be one of {', '.join(INCLUDES)}")


RESPONSE = record(id=TEXT, object={"const": "response"}, created_at=TIME, status=TEXT, model=TEXT,
                  output=array(OBJECT))  # fmt: skip
TAG = "Responses"
ROUTES = (
    Route("POST", "/v1/responses", "responses", create,
          About(tag=TAG, parse=parse_response, examples=examples.RESPONSES, answer=RESPONSE,
                answer_types=(JSON, EVENTS))),
    Route("POST", "/v1/responses/input_tokens", "responses_count", count_input,
          About(tag=TAG, parse=parse_count, examples=examples.RESPONSES,
                answer=record(object={"const": "response.input_tokens"}, input_tokens=COUNT))),
    Route("GET", "/v1/responses/{response_id}", "response", retrieve,
          About(tag=TAG, answer=RESPONSE, answer_types=(JSON, EVENTS),
                query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer"}})),
    Route("DELETE", "/v1/responses/{response_id}", "response_delete", delete,
          About(tag=TAG, answer=record(id=TEXT, deleted={"const": True}))),
    Route("POST", "/v1/responses/{response_id}/cancel", "response_cancel", cancel, About(tag=TAG, answer=RESPONSE)),
    Route("GET", "/v1/responses/{response_id}/input_items", "response_input", input_items,
          About(tag=TAG, answer=record(object={"const": "list"}, data=array(OBJECT)),
                query={"after": TEXT, "order": {"enum": ["asc", "desc"]},
                       "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}})),
)  # fmt: skip
