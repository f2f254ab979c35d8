"""API keys: ``Authorization: Bearer <key>``. Every route needs one unless it is listed here as open."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from aiohttp import web

from web.errors import ApiError

OPEN_ROUTES = frozenset({"health", "livez", "readyz", "ping", "version", "metrics"})
"""Names of routes anybody may call. Decided by the matched route, never by the text of the path."""


class KeyRing:
    """Holds digests only; comparing takes the same time whichever key is tried and however much of it is right."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def admits(self, request: web.Request) -> bool:
        """Whether the request may go on."""
        if not self._digests or request.match_info.route.name in OPEN_ROUTES:
            return True
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def unauthorized() -> ApiError:
    """401; it does not say whether a key was missing or wrong."""
    return ApiError(
        401, "A valid API key is needed: send `Authorization: Bearer <key>`.", code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
