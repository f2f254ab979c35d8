"""``Expect: 100-continue``, from clients that send a long body only once the server wants it.

aiohttp would ask for every body before any handler has looked at the head, also for one that is refused unread.
"""

from __future__ import annotations

from aiohttp import HttpVersion11, web

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOLD = web.RequestKey("told_to_continue", bool)


async def check_expectation(request: web.Request) -> None:
    """Whether nothing else is expected.

    Raises:
        HTTPExpectationFailed: 417, something else is.
    """
    if request.version >= HttpVersion11 and not _waits(request):
        raise web.HTTPExpectationFailed


async def ask_for_body(request: web.Request) -> None:
    """Tell a client that waits for it to send its body."""
    if request.version >= HttpVersion11 and _waits(request) and _TOLD not in request:
        request[_TOLD] = True
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # the response has not begun


def is_unasked(request: web.Request) -> bool:
    """Whether a client may still wait with its body. It need not send a body that is refused, so nothing after this
    request can be told from one: the connection must not be used again."""
    return _waits(request) and _TOLD not in request and not request.content.at_eof()


def _waits(request: web.Request) -> bool:
    return request.headers.get("Expect", "").lower() == "100-continue"
