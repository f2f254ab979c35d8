"""The outermost middleware of every route: request ids, API keys, errors in OpenAI's shape, request counts."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from pagebus.actors.runtime.actor import describe
from pagebus.bus.contract import BusUnavailable
from pagebus.web.access.auth import API_KEY, forbidden, may_call, unauthorized
from pagebus.web.http import anthropic
from pagebus.web.http.errors import ApiError, bus_away, from_http, internal, no_room
from pagebus.web.http.expect import is_unasked
from pagebus.web.server.context import (
    CONTEXT,
    REQUEST_ID,
    REQUEST_ID_GIVEN,
    Context,
    logged_as,
    request_id_of,
)
from pagebus.web.server.unknown_routes import unknown_route
from pagebus.web.telemetry.load_report import TOLD, format_of, written

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOO_MANY, CLIENT_CLOSED_REQUEST = 429, 499
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


@web.middleware
async def boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Nothing gets past this: every error becomes a response, and every request is counted."""
    context = request.app[CONTEXT]
    request[REQUEST_ID], request[REQUEST_ID_GIVEN] = request_id_of(request.headers)
    if context.tracing is not None:
        context.tracing.arriving(request.headers)
    status, began_s = CLIENT_CLOSED_REQUEST, time.monotonic()
    try:
        response = await _response(context, request, handler)
        status = response.status
        if request.writer.output_size > 0 and not response.prepared:
            raise ConnectionResetError  # another one has begun, and can only be broken off
        return response
    finally:
        context.metrics.http(request.method, route_of(request), status, time.monotonic() - began_s)
        if context.request_log is not None:
            context.request_log.answered(logged_as(request), request.method, route_of(request), status)


async def _response(context: Context, request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        context.hosts.check(request)
        if (preflight := context.cors.preflight(request)) is not None:
            return preflight
        if context.keys.is_empty and context.cors.refuses(request):  # a page has no key
            raise ApiError(403, "Pages of this origin may not use this server (--allowed-origins).", code="origin")
        key = context.keys.find(request)
        if key is None:
            raise unauthorized()
        if not may_call(key, request):
            raise forbidden()
        request[API_KEY] = key
        return await handler(request)
    except ApiError as error:
        if error.status == TOO_MANY:
            context.metrics.rejected(error.overloaded)
        if error.status >= 500:
            context.log.warning("request failed", **logged_as(request), status=error.status, code=error.code)
        return _refused(request, error)
    except BusUnavailable as error:
        context.log.warning("bus unavailable", **logged_as(request), error=describe(error))
        return _refused(request, bus_away())
    except web.HTTPNotFound:
        found = await unknown_route(request)
        return _refused(request, found) if isinstance(found, ApiError) else found
    except web.HTTPException as error:
        return _refused(request, from_http(error)) if error.status >= 400 else error
    except (asyncio.CancelledError, ConnectionResetError):
        raise  # the client is gone
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
            context.log.error("the disk is full", **logged_as(request), error=describe(error))
            return _refused(request, no_room())
        context.log.exception("handler failed", **logged_as(request), error=describe(error))
        return _refused(request, internal())


def _refused(request: web.Request, error: ApiError) -> web.Response:
    """The error in the shape of the API that the client speaks."""
    if _speaks_anthropic(request):
        return error.response({**anthropic.error_body(error), "request_id": request[REQUEST_ID]})
    return error.response()


def _speaks_anthropic(request: web.Request) -> bool:
    path = request.path.removeprefix(request.app[CONTEXT].settings.root_path or "")
    return f"{path}/".startswith("/v1/messages/") or anthropic.is_anthropics(request)


def route_of(request: web.Request) -> str:
    """The path of the matched route, ``none`` if none matched: never what the client wrote."""
    resource = request.match_info.route.resource
    root = request.app[CONTEXT].settings.root_path or ""
    return "none" if resource is None else resource.canonical.removeprefix(root) or "/"


async def mark_response(request: web.Request, response: web.StreamResponse) -> None:
    """Every response says which request it answers, and which pages may read it. Connections of a server that ends are
    not kept: their clients find another one. Neither are those of clients that wait with a body that nobody wants."""
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
        if _speaks_anthropic(request):
            response.headers["Request-Id"] = request[REQUEST_ID]  # where Anthropic's clients look
    context = request.app[CONTEXT]
    context.cors.mark(request, response)
    if context.draining() or is_unasked(request):
        response.force_close()
        response.headers["Connection"] = "close"
    if (form := format_of(request)) and (load := await context.read_load()):
        response.headers[TOLD] = written(form, load)
