"""What a request to an unknown path gets: the way to the route that is meant, where one is near."""

from __future__ import annotations

import re

from aiohttp import web

from pagebus.web.http.errors import MAX_SHOWN, ApiError
from pagebus.web.server.context import CONTEXT

VERSION = "/v1"


async def unknown_route(request: web.Request) -> web.Response | ApiError:
    """A redirect where only a trailing slash is too much, as vLLM's server does it; else a 404 that says what exists.

    The path of a redirect is one of our routes, so it never leads to another server. What is told begins with
    ``--root-path``, as a proxy may have taken that off.
    """
    path, root = request.path, request.app[CONTEXT].settings.root_path or ""
    if (shorter := path.rstrip("/")) != path and await _exists(request, shorter):
        there = request.rel_url.with_path(_below(root, shorter), keep_query=True)
        return web.Response(status=307, headers={"Location": str(there)})
    shown = path if len(path) <= MAX_SHOWN else path[:MAX_SHOWN] + "..."
    text = f"There is no route {request.method} {shown}. {await _hint(request, path, root)}"
    return ApiError(404, text, code="unknown_route")


def _below(root: str, path: str) -> str:
    return path if path.startswith(f"{root}/") else root + path


async def _hint(request: web.Request, path: str, root: str) -> str:
    """The route that is meant, if the path differs only in what is commonly mistaken: version, slashes, upper case."""
    below = re.sub("/+", "/", _below(root, path).removeprefix(root)).rstrip("/").lower()
    if await _exists(request, root + VERSION + below):
        return f"Did you mean {root}{VERSION}{below}? The base URL of OpenAI's clients ends in {VERSION}."
    for each in (below, below.removeprefix(VERSION)):
        if await _exists(request, root + each):
            return f"Did you mean {root}{each}?"
    return f"GET {root}/docs lists all routes."


async def _exists(request: web.Request, path: str) -> bool:
    """Whether the request would find a route there."""
    if not path.startswith("/") or path == request.path:
        return False
    there = request.clone(rel_url=request.rel_url.with_path(path))
    return (await request.app.router.resolve(there)).http_exception is None
