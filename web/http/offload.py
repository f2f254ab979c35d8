"""Runs long work in a thread, so that the event loop and its streams go on, if slower.

There is one thread for all such work. Python runs one thread at a time, and the event loop would wait for each of
several.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from pagebus.web.http.errors import ApiError

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload")


async def offload(work: Callable[[], T], *, long: bool = True) -> T:
    """Do ``work`` in the thread and return what it returns; work that is not ``long`` is done at once."""
    if not long:
        return work()
    result, refusal = await asyncio.get_running_loop().run_in_executor(_THREAD, _done, work)
    if refusal is not None:
        raise refusal
    return cast(T, result)


def _done(work: Callable[[], T]) -> tuple[T | None, ApiError | None]:
    """What ``work`` returns, or why it refuses. The refusal is without its frames: these hold all of what is refused,
    until the collector of garbage finds them, and the loop waits while it frees that."""
    try:
        return work(), None
    except ApiError as error:
        error.__context__ = None
        return None, error.with_traceback(None)
