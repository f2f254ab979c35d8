"""Cross-origin requests: which web origins may use this server from a browser. By default, none may."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web

METHODS = "GET, POST, DELETE, OPTIONS"
EXPOSED = "X-Request-Id, Request-Id, Retry-After, X-Should-Retry"
MAX_AGE_S = 600
HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
_NAMES = re.compile(r"[A-Za-z0-9-]+( *, *[A-Za-z0-9-]+)*")


class Cors:
    """``origins`` are those allowed (``https://example.org``), or ``*``. No cookies: scripts send keys themselves."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser's preflight request, which comes without a key."""
        if not self._origins or request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(MAX_AGE_S)}
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    def refuses(self, request: web.Request) -> bool:
        """Whether the request comes from an origin that may not use this server. Such a page could not read the answer,
        but the request would take effect: browsers send forms and plain text without a preflight, and name the
        origin."""
        if request.method in HARMLESS or "*" in self._origins:
            return False
        site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin", "")
        if site is None:  # no browser, or one that is not sure whom it speaks to: plain HTTP to another machine
            from_here = not is_page(origin) or origin.partition("://")[2] == request.headers.get("Host")
        else:
            from_here = site in ("none", "same-origin")
        return not from_here and origin not in self._origins

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """Allow the browser's page to read the response, if its origin is allowed."""
        if not self._origins:
            return
        everybody = "*" in self._origins
        origin = request.headers.get("Origin")
        if not everybody:
            varies = response.headers.get("Vary")
            response.headers["Vary"] = f"{varies}, Origin" if varies else "Origin"
        if origin is not None and (everybody or origin in self._origins):
            response.headers["Access-Control-Allow-Origin"] = "*" if everybody else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED


def is_page(origin: str) -> bool:
    """Whether this is the origin of a web page, or a hidden one. Programs built on web technology have other
    schemes."""
    return origin.startswith(("http://", "https://", "null"))
