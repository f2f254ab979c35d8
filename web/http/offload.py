"""Work that takes longer than an event loop may stand still, done in a thread: streams go on beside it, if slower.

One thread for all: Python runs one at a time anyway, and the more wait for their turn the longer the loop does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from pagebus.web.http.errors import ApiError

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aside")


async def aside(work: Callable[[], T], *, long: bool = True) -> T:
    """What ``work`` returns or raises. If it is not ``long``, it is done at once."""
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
