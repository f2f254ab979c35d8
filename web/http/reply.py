"""Whole HTTP responses: JSON, and responses that are sent at once."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web


def json_response(data: Any, status: int = 200) -> web.Response:
    """JSON by orjson."""
    return web.Response(status=status, body=orjson.dumps(data), content_type="application/json")


async def send(request: web.Request, response: web.Response) -> web.Response:
    """Write a whole response now: when this returns, the client has it as far as we can know."""
    await response.prepare(request)
    await response.write_eof()
    return response
