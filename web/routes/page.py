"""``GET /`` and the files it is made of: those of ``web/static``, read once, under a strict security policy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import web

from web.answer_schemas import OBJECT, TEXT, record
from web.context import CONTEXT
from web.routes import JSON, About, Route, json_response

FOLDER = Path(__file__).parents[1] / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".woff2": "font/woff2",
    ".svg": "image/svg+xml",
    ".gz": "application/gzip",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "font-src 'self'",
        "connect-src 'self'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file as it is sent."""

    body: bytes
    content_type: str
    tag: str


@cache
def files() -> dict[str, File]:
    """All files by their path under the folder: nothing else can be asked for."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file() and path.suffix in TYPES:
            body = path.read_bytes()
            tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            found[path.relative_to(FOLDER).as_posix()] = File(body, TYPES[path.suffix], tag)
    return found


def respond(request: web.Request, file: File) -> web.Response:
    """The file, or 304 if the browser has it already: it asks each time, so a new version is seen at once."""
    headers = {**SECURITY, "ETag": file.tag, "Cache-Control": "no-cache"}
    if request.headers.get("If-None-Match") == file.tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers={**headers, "Content-Type": file.content_type})


async def page(request: web.Request) -> web.Response:
    """The page for browsers; for other programs, where to look."""
    if "text/html" in request.headers.get("Accept", ""):
        response = respond(request, files()["index.html"])
    else:
        links = {"models": "/v1/models", "chat": "/v1/chat/completions", "completions": "/v1/completions",
                 "health": "/health", "metrics": "/metrics", "docs": "/docs",
                 "events": "/api/events"}  # fmt: skip
        response = json_response({"name": "pagebus", "version": request.app[CONTEXT].version, "links": links})
    response.headers["Vary"] = "Accept"
    return response


async def static(request: web.Request) -> web.Response:
    """One of the page's files."""
    file = files().get(request.match_info["path"])
    if file is None:
        raise web.HTTPNotFound
    return respond(request, file)


_ROOT = About(answer=record(name=TEXT, version=TEXT, links=OBJECT), answer_types=(JSON, "text/html"))
ROUTES = (
    Route("GET", "/", "page", page, _ROOT),
    Route("GET", "/static/{path:.+}", "static", static, About(answer_types=("*/*",))),
)
