"""API keys: ``Authorization: Bearer <key>``, or ``x-api-key: <key>`` as Anthropic's clients send it.

Every route needs one unless it is listed here as open.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from pagebus.web.http.errors import ApiError

OPEN_ROUTES = frozenset(
    {"health", "livez", "readyz", "ping", "version", "load", "metrics", "page", "to_the_page", "static", "docs"}
)
"""Names of routes that need no key. The matched route decides, never the text of the path."""
OPERATOR_ROUTES = frozenset(
    {"events", "history", "block", "tables", "cancel", "order", "debug_state"}
    | {"pause", "resume", "is_paused", "reset_prefix_cache", "sleep", "wake_up", "is_sleeping", "server_info"}
    | {"load_lora_adapter", "unload_lora_adapter"}
)
"""Names of routes that show or end the requests of other keys."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: only its digest is kept, and only its name is ever shown. A limit of None is none."""

    name: str
    digest: bytes = field(repr=False)
    max_requests: int | None = None
    max_tokens: int | None = None
    private_cache: bool = False
    """Whether its cached prompts are kept separate from those of other keys."""
    weight: float = 1.0
    """Its share of the tokens, relative to other keys that have work."""
    tokens_per_minute: int | None = None
    operator: bool = False
    """Whether it may inspect and control the deployment and the requests of all keys."""

    def salted(self, cache_salt: str | None) -> str | None:
        """The salt for a request that asks for ``cache_salt``."""
        if not self.private_cache:
            return cache_salt
        return hmac.new(self.digest, (cache_salt or "").encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


API_KEY = web.RequestKey("api_key", ApiKey)
"""The key of an authorized request."""
ANYBODY = ApiKey("", b"", operator=True)
"""Stands for the client where no key is needed."""


class KeyRing:
    """The keys that are valid. Comparing takes the same time whichever is tried and however much of it is right."""

    def __init__(self, given: Sequence[str] = (), listed: Sequence[ApiKey] = ()) -> None:
        self._given = [ApiKey(f"key {index}", digest_of(key), operator=True) for index, key in enumerate(given)]
        self._keys: list[ApiKey] = []
        self.replace(listed)

    def replace(self, listed: Sequence[ApiKey]) -> None:
        """Replace the keys from the file; those given as a setting stay."""
        self._keys = [*self._given, *listed]

    @property
    def is_empty(self) -> bool:
        """Whether no key is needed."""
        return not self._keys

    @property
    def has_one(self) -> bool:
        """Whether nothing is shared: there is one key, or none is needed."""
        return len(self._keys) < 2

    def named(self, name: str) -> ApiKey | None:
        """The key of this name; "" is the anonymous client's, while no key is needed."""
        if not self._keys:
            return ANYBODY
        return next((key for key in self._keys if key.name == name), None)

    def find(self, request: web.Request) -> ApiKey | None:
        """The key of a request; None: the request is not authorized."""
        if not self._keys or request.match_info.route.name in OPEN_ROUTES:
            return ANYBODY
        authorization = request.headers.get("Authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        scheme, _, key = authorization.partition(" ")
        given = digest_of(key.strip())
        found = [key for key in self._keys if hmac.compare_digest(given, key.digest)]
        return found[0] if found and scheme.lower() == "bearer" else None


def may_call(key: ApiKey, request: web.Request) -> bool:
    """Whether the key may call the route of a request."""
    return key.operator or request.match_info.route.name not in OPERATOR_ROUTES


def forbidden() -> ApiError:
    """403: the key is valid, but not for this."""
    text = "This is for the operator: the API key needs `operator = true` in the file of keys."
    return ApiError(403, text, code="operator_only")


def unauthorized() -> ApiError:
    """401; it does not say whether a key was missing or wrong."""
    return ApiError(
        401, "A valid API key is needed: send `Authorization: Bearer <key>`.", code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
