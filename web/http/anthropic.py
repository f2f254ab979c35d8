"""Clients of Anthropic's API: how they are known, and the shape that they expect of errors."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagebus.web.http.errors import ApiError

VERSION_HEADER = "anthropic-version"
"""Anthropic requires it of every request, and nobody else sends it."""
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropics(request: web.Request) -> bool:
    """Whether a client speaks Anthropic's API, on whichever route."""
    return VERSION_HEADER in request.headers


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {**error.body()["error"], "type": kind}}
