"""Reading request bodies, within limits of size and time, and of all that are being read at once."""

from __future__ import annotations

import asyncio

from aiohttp import web

from web.errors import ApiError, overloaded
from web.limits import BODY_TIMEOUT_S, MAX_BODIES_BYTES


class Bodies:
    """The bodies that an ingress is reading. ``max_bytes`` is the limit of one."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

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
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.content.iter_any():
                    self.num_bytes += len(chunk)
                    body += chunk
                    if len(body) > self.max_bytes:
                        raise self._too_large()
                    if self.num_bytes > MAX_BODIES_BYTES:
                        raise overloaded("bytes of request bodies", MAX_BODIES_BYTES, 1)
        except web.RequestPayloadError:
            raise ApiError(400, "The body is not encoded as its headers say.", code="invalid_http") from None
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s.", code="body_timeout") from None
        finally:
            self.num_bytes -= len(body)
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body may have at most {self.max_bytes} bytes.", code="body_too_large")
