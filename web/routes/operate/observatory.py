"""``/api``: data of the page, and operators' commands to the deployment."""

from __future__ import annotations

import math

from aiohttp import web

from pagebus.actors.runtime.actor import orders_state
from pagebus.bus.messages import BlockRequested, BlockState
from pagebus.web.answers.answer_schemas import OBJECT, TEXT, record
from pagebus.web.answers.writing import HEADERS, EventStream
from pagebus.web.http.errors import ApiError, bad_field
from pagebus.web.http.fields import ONLY_NULL, Fields, Schema
from pagebus.web.http.limits import INT32_MAX, MAX_NAME_CHARS
from pagebus.web.http.packing import Packer
from pagebus.web.observatory.history import DAY_S
from pagebus.web.observatory.roster import ORDER_TTL_S
from pagebus.web.requests.openai import parse_json
from pagebus.web.routes import EVENTS, JSON, About, Route, json_response
from pagebus.web.server.context import CONTEXT

MIN_SPAN_S = 10.0
ORDERS = ("drain", "stop")


async def events(request: web.Request) -> web.StreamResponse:
    """All data of the page, as named events, until it disconnects."""
    context = request.app[CONTEXT]
    packer = Packer(request.headers.get("Accept-Encoding", ""))
    watcher = context.observatory.watch()
    stream = EventStream(request, context.streams, {**HEADERS, **packer.headers})
    try:
        while (news := await watcher.events()) is not None:
            await stream.write(packer.pack(news))
        return await stream.end(packer.end())
    finally:
        stream.close()
        await context.observatory.leave(watcher)


async def history(request: web.Request) -> web.Response:
    """The figures of the last ``span_s`` seconds."""
    span_s = _number(request, "span_s", 600.0, MIN_SPAN_S, DAY_S)
    return json_response(await request.app[CONTEXT].observatory.history.read(span_s))


async def block(request: web.Request) -> web.Response:
    """The holders and the content of a block."""
    context, replica = request.app[CONTEXT], request.query.get("replica", "")
    if not 0 < len(replica) <= MAX_NAME_CHARS:
        raise bad_field("replica", "is required")
    number, on_host = int(_number(request, "block", 0, 0, INT32_MAX)), request.query.get("tier") == "host"
    queries = context.observatory.queries
    told = await queries.ask(
        BlockState,
        lambda serial: BlockRequested(
            ingress=queries.address, serial=serial, replica=replica, block=number, on_host=on_host
        ),
    )
    shown = {"owners": told.owners, "hashes": told.hashes, "place": told.place, "table": told.table.tolist()}
    return json_response(shown | {"first_block": told.first_block, "adapter": told.adapter})


async def tables(request: web.Request) -> web.Response:
    """The block tables of a request's sequences, with the blocks that others hold too. Empty once it has ended, and
    while no page is connected to this ingress."""
    board = request.app[CONTEXT].observatory.board
    return json_response({"sequences": board.blocks_of(request.match_info["id"])})


async def cancel(request: web.Request) -> web.Response:
    """End a request; its client is told."""
    await _read_nothing(request)
    request.app[CONTEXT].inbox.cancel(request.match_info["id"])
    return json_response({"status": "asked"})


async def order(request: web.Request) -> web.Response:
    """Have an actor drain or stop when it next renews its lease. Its supervisor restarts it."""
    await _read_nothing(request)
    context, kind, name = request.app[CONTEXT], request.match_info["kind"], request.match_info["name"]
    what = request.match_info["order"]
    lease = context.observatory.roster.find(kind, name)
    if what not in ORDERS or lease is None:
        raise ApiError(404, "There is no such actor, or no such order.", code="not_found")
    if not context.observatory.restarts_alone:
        raise ApiError(409, "All actors share one process here: none can be ended alone.", code="single_process")
    await context.observatory.order(orders_state(kind, name), {"epoch": lease.epoch, "order": what}, ORDER_TTL_S)
    context.observatory.roster.ordered(kind, name)
    context.log.warning("an operator has ordered", order=what, kind=kind, name=name)
    return json_response({"status": "asked"})


async def _read_nothing(request: web.Request) -> None:
    """Check that the body is an empty object declared as JSON: a page of another origin cannot send that without a
    preflight."""
    if request.content_type != JSON:
        raise ApiError(415, "Send Content-Type: application/json.", code="content_type")
    Fields(parse_json(await request.app[CONTEXT].bodies.read(request))).finish({})


def _number(request: web.Request, name: str, default: float, low: float, high: float) -> float:
    try:
        value = float(request.query.get(name, default))
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise bad_field(name, f"must be a number from {low:g} to {high:g}")
    return value


_NOTHING: Schema = {"type": "object", "additionalProperties": ONLY_NULL}
_ORDER = About(tag="Observation", body=_NOTHING, answer=record(status=TEXT))
_SPAN = {"span_s": {"type": "number", "minimum": MIN_SPAN_S, "maximum": DAY_S}}
_PLACE = {
    "replica": TEXT,
    "block": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
    "tier": {"enum": ["device", "host"]},
}
ROUTES = (
    Route("GET", "/api/events", "events", events, About(tag="Observation", answer_types=(EVENTS,))),
    Route("GET", "/api/history", "history", history, About(tag="Observation", query=_SPAN, answer=OBJECT)),
    Route("GET", "/api/blocks", "block", block, About(tag="Observation", query=_PLACE, answer=OBJECT)),
    Route("GET", "/api/requests/{id}/blocks", "tables", tables, About(tag="Observation", answer=OBJECT)),
    Route("POST", "/api/requests/{id}/cancel", "cancel", cancel, _ORDER),
    Route("POST", "/api/actors/{kind}/{name}/{order}", "order", order, _ORDER),
)
