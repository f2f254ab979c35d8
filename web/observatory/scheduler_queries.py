"""Queries from this ingress to the scheduler. Their answers arrive with the replies to requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pagebus.bus.messages import (
    BlockRequested,
    BlockState,
    CacheResetRequested,
    HoldRequested,
    HoldState,
    SchedulerState,
    StateRequested,
)
from pagebus.bus.outbox import OUTBOX_LIMIT, Outbox
from pagebus.web.http.errors import bus_away, unavailable

ANSWER_TIMEOUT_S = 2.0

Query = StateRequested | BlockRequested | HoldRequested | CacheResetRequested
Answer = TypeVar("Answer", SchedulerState, BlockState, HoldState)


class SchedulerQueries:
    """Open queries by their serial numbers, which identify the answers."""

    def __init__(self, outbox: Outbox, control: str, address: str) -> None:
        self.address = address
        self._outbox = outbox
        self._control = control
        self._serial = 0
        self._open: dict[int, asyncio.Future[SchedulerState | BlockState | HoldState]] = {}

    async def ask(self, kind: type[Answer], query: Callable[[int], Query]) -> Answer:
        """Send the query that ``query`` makes of a serial number, and return its answer.

        Raises:
            ApiError: 503, the scheduler does not answer.
        """
        if self._outbox.depth > OUTBOX_LIMIT // 2:
            raise bus_away()
        self._serial += 1
        serial = self._serial
        answer = self._open[serial] = asyncio.get_running_loop().create_future()
        try:
            self._outbox.publish(self._control, query(serial))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                found = await answer
        except TimeoutError:
            raise unavailable("The scheduler does not answer.") from None
        finally:
            del self._open[serial]
        if not isinstance(found, kind):
            raise unavailable("The scheduler has answered something else.")
        return found

    def answered(self, answer: SchedulerState | BlockState | HoldState) -> None:
        """Deliver an answer, perhaps too late."""
        waiting = self._open.get(answer.serial)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
