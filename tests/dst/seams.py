"""Where product code reads a clock, draws a number, starts a thread or listens: here, all of it is the world's."""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest

import pagebus.actors.detokenizer.actor
import pagebus.actors.executor.actor
import pagebus.actors.runtime.actor
import pagebus.actors.scheduler.actor
import pagebus.actors.telemetry.steady_clock
import pagebus.actors.tokenizer.actor
import pagebus.bus.backoff
import pagebus.web.calls.call
import pagebus.web.jobs.actor
import pagebus.web.server.listener
from pagebus.actors.executor.step_watch import StepWatch
from pagebus.actors.scheduler import request
from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.fleet import roles
from pagebus.bus.messages.moves import PATIENCE_S
from pagebus.web.access.admission import Admission
from pagebus.web.answers.writing import Streams
from pagebus.web.ingress.membership import Membership
from tests.actors.scheduler.moves.splits import change_often
from tests.dst import constrained
from tests.dst.engine import Machine, OracleEngine
from tests.dst.loop import START_S, SimulatedLoop
from tests.dst.pipe import MemorySocket

WALL_S = 1_700_000_000.0
OWN_CLOCKS = (Admission, Membership, StepWatch, Streams)
"""Their ``clock`` is the real one unless they are told."""
SILENT_S = math.inf
"""Ingresses do not ask again for what is silent: that would hide that it was lost."""
LATE_S = 12.0
"""How late a scheduler that was frozen, or cut off, may notice that a pull takes too long."""
load_encoder = cache(pagebus.actors.tokenizer.actor.load_encoder)
load_decoder = cache(pagebus.actors.detokenizer.actor.load_decoder)


class CheckedCore(Core):
    """Its integrity is checked after every plan, and that nobody waits too long for a pull."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self._pulling_since_s: dict[int, float] = {}

    def plan_in_turns(self, now_s: float) -> Any:
        waits_s = [now_s - since_s for since_s in self._pulling_since_s.values()]
        assert max(waits_s, default=0.0) <= PATIENCE_S + LATE_S, "a sequence waits too long for a pull"
        for part in super().plan_in_turns(now_s):
            self.check_integrity()
            yield part
        waiting = [each.id for each in self.waiting if self.planner.pulls.is_pulling(each)]
        self._pulling_since_s = {each: self._pulling_since_s.get(each, now_s) for each in waiting}


class WallClock:
    """What ``time.time`` says; ``ahead_s`` of what it should."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.ahead_s = 0.0
        self._loop = loop

    def __call__(self) -> float:
        return WALL_S + self._loop.now_s - START_S + self.ahead_s


def inline(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """:func:`pagebus.actors.executor.actor.in_thread`, at once."""
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


class Recorder:
    """A log whose lines go to ``tell``."""

    def __init__(self, tell: Callable[[str], None], **bound: Any) -> None:
        self._tell, self._bound = tell, bound

    def bind(self, **bound: Any) -> Recorder:
        return Recorder(self._tell, **self._bound, **bound)

    def _line(self, event: str, **fields: Any) -> None:
        fields = {**self._bound, **fields}
        name = fields.pop("actor", "")
        fields.pop("pid", None)
        self._tell(f"{name}: {event} {' '.join(f'{key}={value!r:.200}' for key, value in fields.items())}".strip())

    debug = info = warning = error = exception = _line


@contextlib.contextmanager
def sealed(
    loop: SimulatedLoop, rng: random.Random, machine: Machine, model: str, tell: Callable[[str], None]
) -> Iterator[WallClock]:
    """Inside, nothing that actors ask for comes from outside of the world."""
    wall = WallClock(loop)
    ports = iter(range(10_000, 100_000))
    switch_interval_s = sys.getswitchinterval()

    async def listen(host: str, port: int, *, share: bool = False) -> list[MemorySocket]:
        return [MemorySocket(next(ports))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", wall)
        patch.setattr(time, "monotonic", loop.time)
        patch.setattr(time, "perf_counter", loop.time)
        patch.setattr(time, "process_time", loop.time)
        for owner in OWN_CLOCKS:
            defaults, named = owner.__init__.__defaults__, owner.__init__.__kwdefaults__
            if named and "clock" in named:
                patch.setattr(owner.__init__, "__kwdefaults__", {**named, "clock": loop.time})
            else:
                patch.setattr(owner.__init__, "__defaults__", (*defaults[:-1], loop.time))
        patch.setattr(pagebus.actors.telemetry.steady_clock, "_BEGAN_S", WALL_S - START_S)
        patch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128), version=4))
        patch.setattr(pagebus.bus.backoff, "random", SimpleNamespace(Random=lambda: rng))
        patch.setattr(pagebus.web.server.listener, "listen", listen)
        patch.setattr(pagebus.actors.executor.actor, "in_thread", inline)
        engine = SimpleNamespace(Engine=partial(OracleEngine, machine))
        patch.setattr(pagebus.actors.executor.actor, "import_engine", lambda: engine)
        constrained.seal(patch, model)
        patch.setattr(pagebus.actors.tokenizer.actor, "load_encoder", load_encoder)
        patch.setattr(pagebus.actors.detokenizer.actor, "load_decoder", load_decoder)
        patch.setattr(pagebus.actors.runtime.actor, "get_logger", partial(Recorder, tell))
        patch.setattr(pagebus.actors.scheduler.actor, "Core", CheckedCore)
        patch.setattr(pagebus.web.calls.call, "SILENT_S", SILENT_S)
        # A seed may kill who works on one and the same request more often than anybody has such bad luck.
        patch.setattr(pagebus.actors.tokenizer.actor, "MAX_DELIVERIES", 1000)
        patch.setattr(pagebus.web.jobs.actor, "MAX_DELIVERIES", 1000)
        patch.setattr(request, "MOST_LOSSES", 1000)
        patch.setattr(request, "SUSPECT_LOSSES", 1000)
        patch.setattr("pagebus.actors.scheduler.core.planner.MOST_LOSSES", 1000)
        patch.setattr(roles, "LEAST_BLOCKS", 1)
        patch.setattr(roles, "LEAST_LEFT", 2)
        change_often(patch, look_s=0.2)
        try:
            yield wall
        finally:
            sys.setswitchinterval(switch_interval_s)
