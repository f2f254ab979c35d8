"""Pulls that are promised while their last blocks are still being copied, so that the report and the next plan travel
meanwhile. Every step from then on waits for the copy, on the device, and gives no result before it is known that all
blocks have come. If some have not, the engine ends, and its work is computed elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from pagebus.actors.executor.device.errors import EngineError

PATIENCE_S = 10.0
"""Longest wait until it is known whether a promise was kept: no copy goes on for longer."""
AHEAD_S = 0.002
"""How long before its end a pull is promised: about the time until a step that needs it begins. Other rows of that step
may wait as long."""


class Early:
    """What a copy may promise: all of it, once no more than its last ``num_blocks`` are on their way."""

    def __init__(self, num_blocks: int, tell: Callable[[torch.cuda.Event], None]) -> None:
        self.num_blocks = num_blocks
        self.is_told = False
        self._tell = tell

    def tell(self, event: torch.cuda.Event) -> None:
        """They will be there behind this event. From now on the copy may not be retried in another way."""
        self.is_told = True
        self._tell(event)


class Promise:
    """That blocks are there behind an ``event``."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event
        self._over = threading.Event()
        self._error = ""

    def follow(self) -> None:
        """Have all later work of the device wait for the event. Device thread."""
        torch.cuda.current_stream().wait_event(self._event)

    def end(self, error: str) -> None:
        """They are there, or not."""
        self._error = error
        self._over.set()

    def prove(self) -> None:
        """Wait until it is known whether they are there.

        Raises:
            EngineError: they are not.
        """
        if not self._over.wait(PATIENCE_S):
            raise EngineError(f"blocks that were promised are not there after {PATIENCE_S:.0f} s")
        if self._error:
            raise EngineError(f"blocks that were promised are not there: {self._error}")


class Promises:
    """Promises that steps may still have to wait for, by pull. Any thread."""

    def __init__(self) -> None:
        self._open: dict[int, Promise] = {}
        self._lock = threading.Lock()

    def give(self, pull: int, event: torch.cuda.Event) -> None:
        """The blocks of a pull are there behind the event."""
        with self._lock:
            self._open[pull] = Promise(event)

    def end(self, pull: int, error: str) -> None:
        """A pull is over. A promise that is not kept stays open: no step may follow it."""
        with self._lock:
            promise = self._open.get(pull) if error else self._open.pop(pull, None)
        if promise is not None:
            promise.end(error)

    def follow(self) -> tuple[Promise, ...]:
        """Have the device wait for all. Returns them, to be proved before results of that work are passed on."""
        with self._lock:
            found = tuple(self._open.values())
        for promise in found:
            promise.follow()
        return found

    def forget(self) -> None:
        """Nobody names these blocks any more."""
        with self._lock:
            self._open.clear()
