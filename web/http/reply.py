"""Whole HTTP responses in JSON."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web


def json_response(data: Any, status: int = 200) -> web.Response:
    """JSON by orjson."""
    return web.Response(status=status, body=orjson.dumps(data), content_type="application/json")
