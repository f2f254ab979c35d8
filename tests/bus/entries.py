"""Entries that the tests of the contract write, and what they look at in those they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagebus.bus.contract import Bus, Entry, EntryId, LogEntry
from pagebus.bus.messages import AbortRequest, StepPlan

OpenBus = Callable[[], Bus]
GROUP = "workers"


def abort(number: int) -> AbortRequest:
    return AbortRequest(request_id=f"r{number}")


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, planned_s=0.5, num_decodes=1, slots=np.array([step], np.int32))


def log(stream: str, epoch: int, index: int) -> LogEntry:
    return LogEntry(stream, EntryId(epoch, index), plan(index % 1000))


def request_ids(entries: Sequence[Entry]) -> list[str]:
    found = []
    for entry in entries:
        assert isinstance(entry.message, AbortRequest)
        found.append(entry.message.request_id)
    return found


async def publish(bus: Bus, stream: str, *numbers: int) -> None:
    await bus.publish([(stream, abort(number)) for number in numbers])


async def read_new(bus: Bus, stream: str, consumer: str = "a", count: int = 128) -> list[Entry]:
    return await bus.read_group(GROUP, consumer, [stream], count=count, block_ms=0)
