"""The death of an actor that runs in the process of its test."""

from __future__ import annotations

import asyncio
import contextlib

from pagebus.actors.runtime.actor import Actor


async def vanish(actor: Actor, run: asyncio.Task[None]) -> None:
    """End it as SIGKILL would, as nearly as one process allows: nothing is finished, its lease is left to expire."""

    async def keep(*_: object, **__: object) -> None:
        return None

    actor.bus.release_lease = keep  # type: ignore[method-assign]
    run.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await run
