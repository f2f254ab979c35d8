"""The scheduler actor: reads the bus, lets the core decide, and writes the bus.

It stands by until it has the lease, reads its predecessor's state to the end, and then leads
(:mod:`pagebus.actors.scheduler.leader`).

A request stays in its work stream until it is over. Everything else that a successor needs is in the journal. Results
are trimmed only after a checkpoint in the journal has summed them up
(:mod:`pagebus.actors.scheduler.recovery.journal`).
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, ClassVar

from pagebus.actors.model.config import ModelConfig
from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.core import Core
from pagebus.actors.scheduler.leader import STANDBY_STATE, Leader
from pagebus.actors.scheduler.recovery.takeover import Recovered, Takeover
from pagebus.actors.scheduler.service.metrics import SchedulerMetrics
from pagebus.actors.scheduler.service.work_stream import WorkStream
from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.spans import spans_of
from pagebus.bus.contract import Bus
from pagebus.bus.outbox import Outbox

LEASE = "leader"
STANDBY_TOLD_S, STANDBY_TTL_S = 1.0, 3.0
"""How often a standby tells that it is there, and for how long that is believed."""


class SchedulerActor(Actor):
    """The scheduler of a deployment. One leads and others stand by. ``core`` makes the decisions."""

    kind: ClassVar[str] = "scheduler"

    def __init__(self, settings: Settings, bus: Bus, name: str) -> None:
        super().__init__(settings, bus, name)
        self.core = Core(CoreConfig(block_size=settings.block_size))
        self._bus_retry = BusRetry(self.log, on_away=self.lease_lapsed)
        self._metrics = SchedulerMetrics(self.metrics, self.publish_soon)
        self._spans = spans_of(settings, name)
        self._outbox: Outbox | None = None
        self._leader: Leader | None = None
        self._told_s = -math.inf

    def lease_name(self) -> str:
        return LEASE

    def lease_info(self) -> dict[str, Any]:
        """Also how an operator holds the work, while one does."""
        return super().lease_info() | ({"held": self.core.held} if self.core.held else {})

    def request_drain(self) -> None:
        super().request_drain()
        if self._leader is not None:
            self._leader.wake()

    def lease_lapsed(self) -> None:
        """Doubt absences for a while: actors without a lease may have been cut off as well."""
        if self._leader is not None:
            self._leader.lease_watch.doubt()

    def bus_restarted(self) -> None:
        """Discard positions that the bus may have lost; a scheduler that plans on lost state would wait forever."""
        if self._outbox is not None:
            self._outbox.bus_restarted()
        if self._leader is not None:
            self._leader.bus_restarted()

    async def stand_by(self) -> None:
        """Tell the scheduler that leads, so that it need not finish its work if it is told to end."""
        if time.monotonic() - self._told_s >= STANDBY_TOLD_S:
            self._told_s = time.monotonic()
            await self.bus.put_state(STANDBY_STATE, {"actor": self.name}, ttl_s=STANDBY_TTL_S)

    async def start(self) -> None:
        """Read the model's end tokens, take over from a predecessor, and lead."""
        if self.bus.advice:  # said here alone, as a deployment has one such actor
            self.log.warning(self.bus.advice)
        model = await asyncio.to_thread(ModelConfig.of, self.settings)
        self.core = Core(CoreConfig.of(self.settings, model, self.epoch))
        outbox = self._outbox = Outbox(self.bus, self.epoch)
        work = WorkStream(self.bus, self.names, f"{self.name}@{self.epoch}", outbox, self.confirm_lease)
        await self._bus_retry.until_taken(work.create_groups, "groups")
        self.spawn(outbox.run(), "outbox")
        began_s = time.monotonic()
        takeover = Takeover(self.bus, self.names, outbox)
        await self._bus_retry.until_taken(takeover.run, "takeover")
        recovered = Recovered(takeover.ledger)
        if recovered:
            seconds = round(time.monotonic() - began_s, 3)
            self.log.info("took over", requests=len(recovered), replicas=sorted(takeover.read), seconds=seconds)
        self._leader = Leader(
            self, self.core, outbox, work, takeover, recovered,
            bus_retry=self._bus_retry, metrics=self._metrics, spans=self._spans,
        )  # fmt: skip
        await self._leader.start(takeover)

    async def serve(self) -> None:
        """Lead until draining and idle, or until another one can go on."""
        assert self._leader is not None
        await self._leader.serve()

    async def drain(self) -> None:
        """Send the queued messages, acknowledge the entries handled, and trim."""
        assert self._leader is not None
        await self._leader.drain()

    async def bequeath(self, error: BaseException) -> None:
        """Record in the journal the request that this scheduler failed on, if there is one."""
        if self._leader is not None:
            await self._leader.bequeath(error)

    async def stop(self) -> None:
        """Write the spans, if requested."""
        if self._spans is not None:
            self._spans.write()

    async def measure(self) -> None:
        self._metrics.update(self.core)
