"""One TCP connection: aiohttp's protocol, extended with a deadline for request headers and a limit of connections per
address.

Malformed HTTP is answered with an error in OpenAI's shape. aiohttp has no options for any of these.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Any

from aiohttp import HttpVersion10, web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo
from aiohttp.web_request import BaseRequest

from pagebus.web.http.errors import ApiError, from_http, internal, overloaded
from pagebus.web.http.limits import HEAD_TIMEOUT_S, KEEPALIVE_S, MAX_HEADERS, MAX_LINE_BYTES


class Connections:
    """Makes the connections of a server, and counts them by the address of the client."""

    def __init__(self, server: web.Server, max_per_address: int | None) -> None:
        self.server = server
        self.max_per_address = max_per_address
        self.of_address: Counter[str] = Counter()

    def __call__(self) -> Connection:
        return Connection(self)

    def closed(self, address: str) -> None:
        """A connection from there is gone."""
        self.of_address[address] -= 1
        if not self.of_address[address]:
            del self.of_address[address]


class Connection(web.RequestHandler):
    """The protocol of one connection."""

    __slots__ = ("_address", "_all", "_head_deadline")

    def __init__(self, connections: Connections) -> None:
        super().__init__(
            connections.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # None is what switches it off
            keepalive_timeout=KEEPALIVE_S,
            auto_decompress=False,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._all = connections
        self._address: str | None = None
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; one too many is told so and closed."""
        peer = transport.get_extra_info("peername")
        limit = self._all.max_per_address
        if limit is not None and isinstance(peer, tuple):
            self._address = network_of(str(peer[0]))
            self._all.of_address[self._address] += 1
            if self._all.of_address[self._address] > limit:
                assert isinstance(transport, asyncio.Transport)
                self._force_close = True
                transport.write(raw_response(overloaded("connections from your address", limit, 1)))
                transport.close()
                return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_waiting()
        if self._address is not None:
            self._all.closed(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse. The rest of an incomplete head has to come soon. HTTP/0.9, whose answers have no head, counts as
        malformed."""
        super().data_received(data)
        self._break_body()
        for place, (message, payload) in enumerate(self._messages):
            if isinstance(message, RawRequestMessage) and message.version < HttpVersion10:
                self._messages[place] = _ErrInfo(400, BadHttpMessage("no head"), "HTTP/0.9"), payload
        if self._waiter is None or self._waiter.done():
            self._stop_waiting()
        elif self._head_deadline is None:
            self._head_deadline = self._loop.call_later(HEAD_TIMEOUT_S, self.force_close)

    def _break_body(self) -> None:
        """Tell the reader of a body that it is broken, if what has come does not go on with it. Nothing after it can be
        understood, so the connection ends with the answer. aiohttp would let the reader wait for the rest."""
        if not self._messages or not isinstance(self._messages[-1][0], _ErrInfo):
            return
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        else:
            body = EMPTY_PAYLOAD if self._current_request is None else self._current_request.content
        if not body.is_eof():
            self._messages.pop()
            body.set_exception(web.RequestPayloadError("what follows is not the rest of it"))
            body.feed_eof()
            self.close()

    def _stop_waiting(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what is not HTTP, or has too long a head. The parser's messages quote the client: they are not
        logged."""
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            self.log_exception("unhandled error in a handler", exc_info=exc)
            response = internal().response()
        else:
            limits = f"a line may have at most {MAX_LINE_BYTES} bytes, and a head {MAX_HEADERS} headers"
            text = f"This is not a valid HTTP request, or its head is too large: {limits}."
            response = ApiError(status, text, code="invalid_http").response()
        response.force_close()
        return response

    async def finish_response(
        self, request: BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """aiohttp's own errors that no middleware sees (an unknown ``Expect``) get our shape, too."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = from_http(resp).response()
        return await super().finish_response(request, resp, start_time)


def raw_response(error: ApiError) -> bytes:
    """A whole response, for a connection of which nothing is read."""
    body = bytes(error.response().body or b"")  # type: ignore[arg-type]
    fields: dict[str, Any] = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**fields, **error.headers}.items())
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{head}\r\n".encode() + body


def network_of(address: str) -> str:
    """The address that a connection counts for: of IPv6 the first 64 bits, since a client may choose the others."""
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Network((int(parsed), 64), strict=False))
    return address
