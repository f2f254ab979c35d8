"""``GET /openapi.json``, and ``GET /docs``, a page that shows it: one file without external resources."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from aiohttp import web

from pagebus.web.answers.answer_schemas import OBJECT
from pagebus.web.http.offload import offload
from pagebus.web.routes import JSON, About, Route

PAGE = Path(__file__).parents[2] / "static" / "docs.html"
DESCRIPTION: web.AppKey[Callable[[], bytes]] = web.AppKey("description")
"""Writes the description: when it is first asked for."""


@cache
def page() -> tuple[bytes, str]:
    """The page, and a policy that lets it run its own script and speak to this server only."""
    text = PAGE.read_text()
    hashes = {name: _hash(text, name) for name in ("script", "style")}
    policy = f"default-src 'none'; connect-src 'self'; script-src {hashes['script']}; style-src {hashes['style']}; "
    return text.encode(), policy + "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _hash(text: str, tag: str) -> str:
    inner = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert inner is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(inner[1].encode()).digest()).decode()}'"


async def openapi(request: web.Request) -> web.Response:
    """This description, in OpenAPI 3.1."""
    body = await offload(request.app[DESCRIPTION])
    return web.Response(body=body, content_type=JSON)


async def docs(request: web.Request) -> web.Response:
    """This description, as a page."""
    body, policy = page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
    return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)


ROUTES = (
    Route("GET", "/openapi.json", "openapi", openapi, About(answer=OBJECT)),
    Route("GET", "/docs", "docs", docs, About(answer_types=("text/html",))),
)
