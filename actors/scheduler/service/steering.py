"""An operator's commands: holding and resuming work, and emptying caches."""

from __future__ import annotations

from collections.abc import Callable

from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.events import CachesReset, WorkHeld
from pagebus.bus.contract import Bus
from pagebus.bus.messages import HOLD_STATE, HOLDS, CacheResetRequested, HoldRequested, HoldState
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names


class Steering:
    """Applies commands. Each is answered once all inputs before it have been handled and planned. ``on_change`` is
    called when the work is held, or is not any more."""

    def __init__(self, core: Core, outbox: Outbox, names: Names, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._core = core
        self._outbox = outbox
        self._names = names
        self._asked: list[HoldRequested | CacheResetRequested] = []

    async def recall(self, bus: Bus) -> None:
        """Hold the work if the predecessor held it."""
        (held,) = await bus.get_state(HOLD_STATE)
        mode = "" if held is None else held.get("mode")
        if mode in HOLDS:
            self._core.handle(WorkHeld(str(mode)))

    def ask(self, message: HoldRequested | CacheResetRequested) -> None:
        """Apply a command; it is answered with the next plan."""
        if isinstance(message, CacheResetRequested):
            self._core.handle(CachesReset(host=message.host, running=message.running))
        elif message.mode in HOLDS:
            self._core.handle(WorkHeld(str(message.mode)))
            self._on_change()
        self._asked.append(message)

    def answer(self) -> None:
        """Send the present state to all who sent commands."""
        for message in self._asked:
            state = HoldState(serial=message.serial, mode=self._core.held, at_rest=self._core.at_rest)
            self._outbox.publish(self._names.replies(message.ingress), state)
        self._asked.clear()
