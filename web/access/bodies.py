"""Reads request bodies, within limits on size, on time and on the bytes being read by all clients.

Long bodies are read in turn (:mod:`pagebus.web.access.turns`). Waiting for a turn does not count towards the deadline
of a body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web

from pagebus.web.access.arrival import Arrival
from pagebus.web.access.auth import API_KEY, KeyRing
from pagebus.web.access.key_share import key_share
from pagebus.web.access.turns import Turn, Turns
from pagebus.web.http.connection import network_of
from pagebus.web.http.errors import ApiError, overloaded
from pagebus.web.http.expect import ask_for_body
from pagebus.web.http.limits import LONG_BODY_BYTES, MAX_BODIES_BYTES, brackets_problem
from pagebus.web.requests.openai import parse_json

T = TypeVar("T")


class Bodies:
    """The bodies that an ingress is reading. ``max_bytes`` limits one body; all keys share the memory."""

    def __init__(self, max_bytes: int, keys: KeyRing) -> None:
        self.max_bytes = max_bytes
        self._keys = keys
        self.turns = Turns()
        self.num_bytes: Counter[str] = Counter()
        """Bytes being read, by the name of the key."""

    async def read_as(self, request: web.Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """What ``parse`` makes of the object in a body.

        Raises:
            ApiError: as of :meth:`read` and ``parse``; 400, it is no object.
        """
        with self._turn_of(request) as turn:
            body = await self._read(request, turn)
            return await turn.work(lambda: parse(parse_json(body)), long=len(body) > LONG_BODY_BYTES)

    async def read(self, request: web.Request) -> bytes:
        """The body of a request.

        Raises:
            ApiError: 408, 413, 415 or 429; 400, it has too many brackets.
        """
        with self._turn_of(request) as turn:
            return await self._read(request, turn)

    def _turn_of(self, request: web.Request) -> Turn:
        """The turn of a key, or of a client address where there are no keys."""
        if not self._keys.is_empty:
            return self.turns.of(request[API_KEY].name, alone=self._keys.has_one)
        peer = request.transport and request.transport.get_extra_info("peername")
        address = network_of(str(peer[0])) if isinstance(peer, tuple) else ""
        return self.turns.of(address, alone=False)

    async def _read(self, request: web.Request, turn: Turn) -> bytes:
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            text = "Content-Encoding is not supported: send the body as it is."
            raise ApiError(415, text, code="unsupported_encoding")
        if (request.content_length or 0) > self.max_bytes:
            raise self._too_large()
        await ask_for_body(request)
        arrival, body, key = Arrival(request, turn), bytearray(), request[API_KEY].name
        try:
            while chunk := await arrival.next():
                self.num_bytes[key] += len(chunk)
                body += chunk
                if len(body) > self.max_bytes:
                    raise self._too_large()
                most = key_share(MAX_BODIES_BYTES, self.num_bytes, key, alone=self._keys.has_one)
                if self.num_bytes[key] > most:
                    raise overloaded("bytes of request bodies", most, 1)
        except web.RequestPayloadError:
            raise ApiError(400, "The body is not encoded as its headers say.", code="invalid_http") from None
        finally:
            self.num_bytes[key] -= len(body)
            if not self.num_bytes[key]:
                del self.num_bytes[key]
        if problem := brackets_problem(body, self.max_bytes):
            raise ApiError(400, f"The body {problem}", code="invalid_json")
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body may have at most {self.max_bytes} bytes.", code="body_too_large")
