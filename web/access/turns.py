"""Takes turns in reading long request bodies: one body per client at a time, and then a rest.

Receiving, parsing and checking a body of megabytes takes milliseconds, during which the process does nothing else. A
client that sends one such body after another would occupy the whole process, and the streams of others would wait
behind each body. A client therefore waits three times as long as its last turn took. Where several clients have long
bodies waiting, all of them together use no more time than one would. A client that has had no turn lately gets one at
once.

A body is not read before its turn, so it waits in socket buffers. A client whose bytes do not arrive loses its turn and
takes another when they do: a slow sender delays no other client.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from pagebus.web.access.key_share import key_share
from pagebus.web.http.errors import overloaded
from pagebus.web.http.limits import MAX_WAITING_BODIES
from pagebus.web.http.offload import offload

T = TypeVar("T")
REST = 3.0
"""Length of the rest after a turn, as a multiple of its duration."""


@dataclass(slots=True)
class Line:
    """The waiting bodies of one client; those already begun come first."""

    begun: deque[asyncio.Future[None]] = field(default_factory=deque)
    new: deque[asyncio.Future[None]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.begun) + len(self.new)

    def pop(self) -> asyncio.Future[None]:
        return (self.begun or self.new).popleft()


class Turns:
    """The turns of all clients of one ingress.

    Args:
        call_later: as an event loop's; None: the running one's.
    """

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object] | None = None) -> None:
        self._call_later = call_later
        self._lines: dict[str, Line] = {}
        """The queues of clients that have a turn or rest after one."""

    def of(self, client: str, *, alone: bool) -> Turn:
        """A future turn of one body. ``alone``: no other client sends any."""
        return Turn(self, client, alone)

    def num_waiting(self) -> Counter[str]:
        """Number of waiting bodies by client."""
        return Counter({client: len(line) for client, line in self._lines.items()})

    async def wait(self, client: str, *, begun: bool, alone: bool) -> None:
        """Wait for the client's turn.

        Raises:
            ApiError: 429, so many wait that one more may not.
        """
        line = self._lines.get(client)
        if line is None:
            self._lines[client] = Line()
            return
        if not begun:
            self._check_room(client, alone=alone)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = line.begun if begun else line.new
        waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # the turn came after its client had left
                self._next(client)
            elif future in waiting:
                waiting.remove(future)
            raise

    def end(self, client: str, took_s: float) -> None:
        """End a client's turn, which took ``took_s`` seconds of processor time."""
        others = sum(bool(line) for name, line in self._lines.items() if name != client)
        rest_s = took_s * ((1 + REST) * (1 + others) - 1)
        call_later = self._call_later or asyncio.get_running_loop().call_later
        call_later(rest_s, lambda: self._next(client))

    def _check_room(self, client: str, *, alone: bool) -> None:
        waiting = self.num_waiting()
        most = key_share(MAX_WAITING_BODIES, waiting, client, alone=alone)
        if waiting[client] >= most:
            raise overloaded("long request bodies", most, 1)

    def _next(self, client: str) -> None:
        """Give the client's next waiting body its turn."""
        line = self._lines[client]
        while line:
            future = line.pop()
            if not future.done():
                future.set_result(None)
                return
        del self._lines[client]


class Turn:
    """The turn of one body, from :meth:`begin` until :meth:`end` or the end of the block."""

    __slots__ = ("_alone", "_client", "_took_s", "_turns", "_working", "begun", "held")

    def __init__(self, turns: Turns, client: str, alone: bool) -> None:
        self._turns = turns
        self._client = client
        self._alone = alone
        self._took_s = 0.0
        self._working: asyncio.Future[Any] | None = None
        """Work that continues after its client has disconnected."""
        self.begun = self.held = False
        """Whether the turn has ever been taken; whether it is held now."""

    async def begin(self) -> None:
        """Wait for it, unless it is held. One that has begun comes before those that have not.

        Raises:
            ApiError: as of :meth:`Turns.wait`.
        """
        if not self.held:
            await self._turns.wait(self._client, begun=self.begun, alone=self._alone)
            self.begun = self.held = True

    def charge(self, seconds: float) -> None:
        """Charge the turn with processor time."""
        self._took_s += seconds

    async def work(self, work: Callable[[], T], *, long: bool) -> T:
        """Run ``work``, beside the loop if it is ``long``, and charge its time. The turn does not end before the work,
        even if the client disconnects."""
        if not long:
            return self._timed(work)
        working = asyncio.ensure_future(offload(lambda: self._timed(work)))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            self._working = working
            raise

    def _timed(self, work: Callable[[], T]) -> T:
        began_s = time.thread_time()
        try:
            return work()
        finally:
            self.charge(time.thread_time() - began_s)

    def end(self) -> None:
        """End the turn, if it is held."""
        if self.held:
            self.held, took_s, self._took_s = False, self._took_s, 0.0
            self._turns.end(self._client, took_s)

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._working is None:
            self.end()
        else:
            self._working.add_done_callback(self._worked)

    def _worked(self, working: asyncio.Future[Any]) -> None:
        working.exception()  # retrieve the exception: the client has left
        self.end()
