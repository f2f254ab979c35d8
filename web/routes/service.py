"""Health, version and metrics."""

from __future__ import annotations

from aiohttp import web

from web.context import CONTEXT
from web.metrics import CONTENT_TYPE
from web.routes import Route, json_response


async def health(request: web.Request) -> web.Response:
    """200 only if a request would be answered now; otherwise 503 with what is missing."""
    context = request.app[CONTEXT]
    missing = context.missing()
    if not missing:
        return json_response({"status": "ok"})
    body = {"status": "unavailable", "missing": list(missing), "actors": context.membership.states()}
    response = json_response(body, 503)
    response.headers["Retry-After"] = "1"
    return response


async def livez(request: web.Request) -> web.Response:
    """200 while the event loop turns."""
    return json_response({"status": "ok"})


async def show_version(request: web.Request) -> web.Response:
    return json_response({"version": request.app[CONTEXT].version})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus text over all actors."""
    text = await request.app[CONTEXT].render_metrics()
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


async def root(request: web.Request) -> web.Response:
    """What this is and where to look."""
    context = request.app[CONTEXT]
    links = {"models": "/v1/models", "chat": "/v1/chat/completions", "completions": "/v1/completions",
             "health": "/health", "metrics": "/metrics"}  # fmt: skip
    return json_response({"name": "pagebus", "version": context.version, "model": context.model.name, "links": links})


ROUTES = (
    Route("GET", "/", "root", root),
    Route("GET", "/health", "health", health),
    Route("GET", "/readyz", "readyz", health),
    Route("GET", "/livez", "livez", livez),
    Route("GET", "/ping", "ping", livez),
    Route("POST", "/ping", "ping", livez),
    Route("GET", "/version", "version", show_version),
    Route("GET", "/metrics", "metrics", metrics),
)
