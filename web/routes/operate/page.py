"""``GET /`` and its files, those of ``web/static``: read once and served under a strict content security policy."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiohttp import web

from pagebus.web.answers.answer_schemas import OBJECT, TEXT, record
from pagebus.web.http.packing import packed, takes_gzip
from pagebus.web.routes import JSON, About, Route, json_response
from pagebus.web.server.context import CONTEXT

FOLDER = Path(__file__).parents[2] / "static"
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
TEXTS = frozenset({".html", ".css", ".js", ".mjs", ".svg", ".txt"})
VERSION_MARK = "v-"
"""Prefix of the path component that names the version of all files."""
IMPORT = re.compile(r'^(?:import|export) [^;]*?from "(\.[^"]+)";', re.MULTILINE)
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
LINKS = {
    "models": "/v1/models", "chat": "/v1/chat/completions", "completions": "/v1/completions", "health": "/health",
    "metrics": "/metrics", "docs": "/docs", "events": "/api/events",
}  # fmt: skip
SECURITY = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class File:
    """One file as sent; ``packed`` with gzip, where that saves bytes."""

    body: bytes
    packed: bytes | None
    content_type: str
    tag: str


@cache
def files() -> dict[str, File]:
    """All files by their path under the folder; no other path is served."""
    bodies = {
        path.relative_to(FOLDER).as_posix(): path.read_bytes()
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file() and path.suffix in TYPES
    }
    digests = "".join(f"{name} {_digest(body)}\n" for name, body in bodies.items())
    bodies["index.html"] = with_version(bodies, _digest(digests.encode()))
    return {name: _file(name, body) for name, body in bodies.items()}


def with_version(bodies: Mapping[str, bytes], digest: str) -> bytes:
    """``index.html`` whose links name the version, and tell the browser of all modules that the first view needs: one
    round trip instead of one for each level of imports. Links are relative: the page may lie below ``--root-path``."""
    needed = first_modules(bodies)
    preloads = "".join(f'\n  <link rel="modulepreload" href="static/{name}">' for name in needed)
    page = bodies["index.html"].decode().replace("<!-- modules -->", preloads.lstrip())
    return page.replace('="static/', f'="static/{VERSION_MARK}{digest}/').encode()


def first_modules(bodies: Mapping[str, bytes]) -> list[str]:
    """What ``js/main.js`` imports, and what that imports, but for what is fetched when it is wanted."""
    found, left = dict[str, None](), ["js/main.js"]
    while left:
        name = left.pop()
        if name in found:
            continue
        found[name] = None
        for other in IMPORT.findall(bodies[name].decode()):
            left.append(posixpath.normpath(posixpath.join(posixpath.dirname(name), other)))
    return sorted(found)


def _file(name: str, body: bytes) -> File:
    kind = TYPES[Path(name).suffix]
    return File(body, packed(body) if Path(name).suffix in TEXTS else None, kind, f'"{_digest(body)}"')


def _digest(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=12).hexdigest()


def respond(request: web.Request, file: File, *, forever: bool = False) -> web.Response:
    """The file, or 304 if the browser has it already: it asks each time, so a new version is seen at once. One whose
    path names its version never changes: the browser keeps it (``forever``)."""
    kept = "public, max-age=31536000, immutable" if forever else "no-cache"
    headers = {**SECURITY, "ETag": file.tag, "Cache-Control": kept, "Vary": "Accept-Encoding"}
    if request.headers.get("If-None-Match") == file.tag:
        return web.Response(status=304, headers=headers)
    body = file.body
    if file.packed is not None and takes_gzip(request.headers.get("Accept-Encoding", "")):
        body, headers["Content-Encoding"] = file.packed, "gzip"
    return web.Response(body=body, headers={**headers, "Content-Type": file.content_type})


async def page(request: web.Request) -> web.Response:
    """The page, for browsers; a pointer to the API, for other programs."""
    if "text/html" in request.headers.get("Accept", ""):
        response = respond(request, files()["index.html"])
    else:
        root = request.app[CONTEXT].settings.root_path or ""  # also where a proxy has taken it off the path
        links = {name: root + path for name, path in LINKS.items()}
        response = json_response({"name": "pagebus", "version": request.app[CONTEXT].version, "links": links})
    response.headers["Vary"] = "Accept, Accept-Encoding"
    return response


async def to_the_page(request: web.Request) -> web.Response:
    """From ``--root-path`` itself to the page below it: relative links need the slash at its end."""
    return web.Response(status=307, headers={"Location": f"{request.path}/"})


async def static(request: web.Request) -> web.Response:
    """One of the page's files. A version before its path is that of the page which links it: with another one (of an
    ingress that is newer or older) the file is sent too, but not to be kept."""
    path, version = request.match_info["path"], ""
    if path.startswith(VERSION_MARK):
        version, _, path = path.partition("/")
    file = files().get(path)
    if file is None:
        raise web.HTTPNotFound
    return respond(request, file, forever=f"/{version}/".encode() in files()["index.html"].body)


_ROOT = About(answer=record(name=TEXT, version=TEXT, links=OBJECT), answer_types=(JSON, "text/html"))
ROUTES = (
    Route("GET", "/", "page", page, _ROOT),
    Route("GET", "/static/{path:.+}", "static", static, About(answer_types=("*/*",))),
)
