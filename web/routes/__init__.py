"""The routes, one module per family; each has a ``ROUTES`` table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """``name`` is what :mod:`web.auth` knows a route by."""

    method: str
    path: str
    name: str
    handler: Handler


def json_response(data: Any, status: int = 200) -> web.Response:
    """JSON by orjson."""
    return web.Response(status=status, body=orjson.dumps(data), content_type="application/json")
