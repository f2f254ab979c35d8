"""Comments in an idle stream, so that no proxy closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial

from pagebus.web.answers.writing import EventStream
from pagebus.web.calls.call import Call, Choice

KEEP_ALIVE = b": keep-alive\n\n"


def changes_of(call: Call, events: EventStream, silence_s: float) -> Callable[[], Awaitable[Sequence[Choice]]]:
    """:meth:`Call.changes`, with a comment after each ``silence_s`` without any; 0: without comments."""
    return partial(_changes, call, events, silence_s) if silence_s else call.changes


def with_comments(told: AsyncGenerator[bytes, None], silence_s: float) -> AsyncGenerator[bytes, None]:
    """What is ``told``, with a comment after each ``silence_s`` without any; 0: without comments."""
    return _with_comments(told, silence_s) if silence_s else told


async def _with_comments(told: AsyncGenerator[bytes, None], silence_s: float) -> AsyncGenerator[bytes, None]:
    async with aclosing(told):
        while True:
            coming = asyncio.ensure_future(anext(told, None))
            try:
                while not coming.done():
                    done, _ = await asyncio.wait({coming}, timeout=silence_s)
                    if not done:
                        yield KEEP_ALIVE
                data = coming.result()
            finally:
                coming.cancel()
                with suppress(asyncio.CancelledError, Exception):  # its error has been raised above, if it has one
                    await coming
            if data is None:
                return
            yield data


async def _changes(call: Call, events: EventStream, silence_s: float) -> Sequence[Choice]:
    while True:
        try:
            async with asyncio.timeout(silence_s):
                return await call.changes()
        except TimeoutError:
            await events.write(KEEP_ALIVE)
