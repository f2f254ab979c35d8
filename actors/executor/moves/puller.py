"""A thread that pulls from one source, in order. A source that hangs holds up its own pulls alone."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from pagebus.actors.executor.device.promises import AHEAD_S, Early
from pagebus.actors.executor.moves.carriers.errors import Abandoned, MoveError
from pagebus.actors.executor.moves.divided import DividedSource
from pagebus.actors.executor.moves.source import Source
from pagebus.bus.messages import Int32Array
from pagebus.bus.messages.moves import PATIENCE_S

LOOK_S = 0.2
"""How often a thread without pulls looks whether its source still lives. Closing the memory of another GPU holds up
steps: for 30 ms while its process is still ending, for 116 ms once it has ended, as all of it is then freed here (two
H200)."""
IDLE_LOOKS = 300
"""Looks without a pull after which the thread ends."""


class Waits(Protocol):
    """An event."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


@dataclass(frozen=True, slots=True)
class Pull:
    """One pull of a plan, which begins after the events ``after``. ``hosts``: the sources are blocks of a host tier.
    ``ordered_s``: when it was ordered, by the monotonic clock."""

    number: int
    scheduler_epoch: int
    sources: Int32Array
    targets: Int32Array
    after: tuple[Waits, ...] = ()
    hosts: bool = False
    ordered_s: float = field(default_factory=time.monotonic)


Done = Callable[[Pull, float, str], None]
"""(pull, seconds, error): it is over. Without an error, its blocks are there."""
PromiseGiven = Callable[[Pull, torch.cuda.Event], None]


class Puller:
    """The thread calls ``prepare``, then ``source``, which opens the source, and ``done`` after each pull.
    ``outdated``: whether the scheduler of this epoch has been replaced. ``promise`` is called, before ``done``, when
    steps may use a pull's blocks behind an event; None: never."""

    def __init__(
        self, prepare: Callable[[], None], source: Callable[[], Source | DividedSource], done: Done,
        outdated: Callable[[int], bool], look_s: float = LOOK_S, promise: PromiseGiven | None = None,
    ) -> None:  # fmt: skip
        self._prepare, self._open, self._done, self._outdated = prepare, source, done, outdated
        self._look_s, self._promise = look_s, promise
        self._blocks_per_s = 0.0
        """Rate of the newest pull out of the cache; 0: there was none, or it failed."""
        self._source: Source | DividedSource | None = None
        self._pulls: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._work, name="puller", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more pulls."""
        return self._has_ended

    def add(self, pulls: list[Pull]) -> bool:
        """Queue pulls; False if the thread has ended."""
        with self._lock:
            if self._has_ended:
                return False
            for pull in pulls:
                self._pulls.put(pull)
            return True

    def close(self) -> None:
        """End the thread behind what is queued."""
        self._pulls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (pull := self._next()) is not None:
            self._run(pull)
        if self._source is not None:
            self._source.close()

    def _next(self) -> Pull | None:
        """The next pull; None if the thread is to end, or nobody has needed it for long."""
        looks = 0
        while True:
            try:
                return self._pulls.get(timeout=self._look_s)
            except queue.Empty:
                looks += 1
            if looks >= IDLE_LOOKS or self._source is None or self._source.is_gone:
                with self._lock:
                    if self._pulls.empty():
                        self._has_ended = True
                        return None

    def _run(self, pull: Pull) -> None:
        error, began_s = "", time.perf_counter()
        try:
            for event in pull.after:
                event.synchronize()
            if self._source is None:
                self._prepare()
                self._source = self._open()
                self._copy(pull, 1)  # opens the memory or connection, which must not count in the link's rate
            self._source.prepare(pull.sources, hosts=pull.hosts)  # nor must this
            began_s = time.perf_counter()
            self._copy(pull, len(pull.sources), self._early(pull))
        except Abandoned as problem:
            error = f"not there after {PATIENCE_S:.0f} s" if _is_late(pull) else str(problem)
        except MoveError as problem:
            error = str(problem)
        except Exception as problem:  # whatever the system may say: the blocks are computed
            error = f"{type(problem).__name__}: {problem}"
        seconds = time.perf_counter() - began_s
        if not pull.hosts:
            self._blocks_per_s = 0.0 if error else len(pull.sources) / max(seconds, 1e-9)
        self._done(pull, seconds, error)

    def _early(self, pull: Pull) -> Early | None:
        """What the copy may promise, if the rate is known, and so how long its last blocks take. While other pulls wait
        behind it, as in a drain, one more report for each would only hold up the others."""
        if self._promise is None or pull.hosts or not self._blocks_per_s or not self._pulls.empty():
            return None
        return Early(int(AHEAD_S * self._blocks_per_s), partial(self._promise, pull))

    def _copy(self, pull: Pull, num_blocks: int, early: Early | None = None) -> None:
        """Copy the first blocks of a pull.

        Raises:
            MoveError: they are not there.
        """
        assert self._source is not None

        def stop() -> bool:
            return _is_late(pull) or self._outdated(pull.scheduler_epoch)

        if stop():
            raise Abandoned("abandoned")
        self._source.copy(pull.sources[:num_blocks], pull.targets[:num_blocks], stop, hosts=pull.hosts, early=early)


def _is_late(pull: Pull) -> bool:
    """Whether nobody waits for it any more."""
    return time.monotonic() - pull.ordered_s > PATIENCE_S
