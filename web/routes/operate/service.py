"""Health, version, load and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aiohttp import web

from pagebus.web.answers.answer_schemas import COUNT, STATUS, TEXT, record
from pagebus.web.routes import About, Route, json_response
from pagebus.web.server.context import CONTEXT
from pagebus.web.telemetry.metrics import CONTENT_TYPE


async def health(request: web.Request) -> web.Response:
    """Whether all actors work, and all that is known: whether steps advance, and what each actor says of itself.

    200 while the work is paused, too: nothing has to be restarted. Answered from the view that the ingress has anyway:
    a probe waits for nobody.
    """
    context = request.app[CONTEXT]
    known = {"progressing": context.membership.progressing(), "open_requests": context.inbox.num_open,
             "bus": context.bus_trouble() or "ok", "actors": context.membership.states()}  # fmt: skip
    return _readiness(context.missing(), known)


async def readyz(request: web.Request) -> web.Response:
    """200 only if a request would be answered now; otherwise 503 with what is missing, or ``paused``."""
    context = request.app[CONTEXT]
    missing = context.missing()
    if not missing and context.membership.is_held:
        return json_response({"status": "paused"}, 503)
    return _readiness(missing, {})


def _readiness(missing: Sequence[str], known: Mapping[str, object]) -> web.Response:
    if not missing:
        return json_response({"status": "ok", **known})
    response = json_response({"status": "unavailable", "missing": list(missing), **known}, 503)
    response.headers["Retry-After"] = "1"
    return response


async def livez(request: web.Request) -> web.Response:
    """200 while the event loop runs."""
    return json_response({"status": "ok"})


async def show_version(request: web.Request) -> web.Response:
    """The version of Pagebus."""
    return json_response({"version": request.app[CONTEXT].version})


async def load(request: web.Request) -> web.Response:
    """The number of requests under way at this ingress, for load balancers."""
    return json_response({"server_load": request.app[CONTEXT].inbox.num_open})


async def metrics(request: web.Request) -> web.Response:
    """Metrics of all actors in Prometheus's text format."""
    text = await request.app[CONTEXT].render_metrics()
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


_STATUS = About(answer=STATUS)
ROUTES = (
    Route("GET", "/health", "health", health, _STATUS),
    Route("GET", "/readyz", "readyz", readyz, _STATUS),
    Route("GET", "/livez", "livez", livez, _STATUS),
    Route("GET", "/ping", "ping", livez, _STATUS),
    Route("POST", "/ping", "ping", livez, _STATUS),
    Route("GET", "/version", "version", show_version, About(answer=record(version=TEXT))),
    Route("GET", "/load", "load", load, About(answer=record(server_load=COUNT))),
    Route("GET", "/metrics", "metrics", metrics, About(answer_types=("text/plain",))),
)
