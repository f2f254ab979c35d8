"""Work that takes longer than an event loop may stand still, done in a thread: streams go on beside it, if slower.

One thread for all: Python runs one at a time anyway, and the more wait for their turn the longer the loop does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aside")


async def aside(work: Callable[[], T], *, long: bool = True) -> T:
    """What ``work`` returns or raises. If it is not ``long``, it is done at once."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work) if long else work()
