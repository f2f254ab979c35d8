"""Reading request bodies, within limits of size and time, and of all that are being read at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from web.aside import aside
from web.auth import API_KEY, KeyRing
from web.errors import ApiError, overloaded
from web.limits import BODY_TIMEOUT_S, BYTES_PER_BRACKET, LONG_BODY_BYTES, MAX_BODIES_BYTES
from web.room import most_of
from web.schemas import parse_json

T = TypeVar("T")


class Bodies:
    """The bodies that an ingress is reading. ``max_bytes`` is the limit of one; all keys share the room."""

    def __init__(self, max_bytes: int, keys: KeyRing) -> None:
        self.max_bytes = max_bytes
        self._keys = keys
        self.num_bytes: Counter[str] = Counter()
        """By the name of the key."""

    async def read_as(self, request: web.Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """What ``parse`` makes of the object in a body.

        Raises:
            ApiError: as of :meth:`read` and ``parse``; 400, it is no object.
        """
        body = await self.read(request)
        return await aside(lambda: parse(parse_json(body)), long=len(body) > LONG_BODY_BYTES)

    async def read(self, request: web.Request) -> bytes:
        """The body of a request.

        Raises:
            ApiError: 408, 413, 415 or 429.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            text = "Content-Encoding is not supported: send the body as it is."
            raise ApiError(415, text, code="unsupported_encoding")
        if (request.content_length or 0) > self.max_bytes:
            raise self._too_large()
        body, key = bytearray(), request[API_KEY].name
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.content.iter_any():
                    self.num_bytes[key] += len(chunk)
                    body += chunk
                    if len(body) > self.max_bytes:
                        raise self._too_large()
                    most = most_of(MAX_BODIES_BYTES, self.num_bytes, key, alone=self._keys.has_one)
                    if self.num_bytes[key] > most:
                        raise overloaded("bytes of request bodies", most, 1)
        except web.RequestPayloadError:
            raise ApiError(400, "The body is not encoded as its headers say.", code="invalid_http") from None
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s.", code="body_timeout") from None
        finally:
            self.num_bytes[key] -= len(body)
            if not self.num_bytes[key]:
                del self.num_bytes[key]
        most = self.max_bytes // BYTES_PER_BRACKET
        if len(body) > most and body.count(b"[") + body.count(b"{") > most:
            raise ApiError(400, f"The body may have at most {most} arrays and objects.", code="invalid_json")
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body may have at most {self.max_bytes} bytes.", code="body_too_large")
