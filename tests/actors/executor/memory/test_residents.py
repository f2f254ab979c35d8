"""Adapters that an executor reads: so many at a time, in the order in which plans name them."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagebus.actors.executor.adapters.residents import READERS, Residents
from pagebus.actors.model.lora.errors import AdapterError
from pagebus.bus.messages import AdapterRead, AdapterSource, StepPlan
from tests.helpers.waiting import LIMIT_S

NUM_WANTED = 5 * READERS


class Files:
    """Reads what it is allowed to, one adapter after the other."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.threads: set[threading.Thread] = set()
        self.allowed = threading.Semaphore(0)

    def read(self, source: AdapterSource) -> Any:
        self.threads.add(threading.current_thread())
        self.begun.put(source.digest)
        assert self.allowed.acquire(timeout=LIMIT_S)
        if source.name == "broken":
            raise AdapterError("no adapter found here")
        return source.digest


def wanted(number: int) -> AdapterSource:
    return AdapterSource(name="broken" if number == 2 else f"{number}", path="/", digest=f"{number}")


def plan(step: int, *sources: AdapterSource) -> StepPlan:
    return StepPlan(step=step, planned_s=0.0, num_decodes=0, loaded_adapters=sources)


def test_so_many_are_read_at_a_time() -> None:
    """A broken one takes nobody's turn. Threads end when all are read, and begin again for the next."""
    files, told = Files(), queue.SimpleQueue[AdapterRead]()
    places: Any = SimpleNamespace(count=100, image=lambda read: read, num_blocks=len)
    slots: Any = SimpleNamespace(of_slot=np.full(4, -1, np.int32))
    residents = Residents(places, slots, files.read, 100, told.put)
    for begin in (0, NUM_WANTED):
        sources = [wanted(number) for number in range(begin, begin + NUM_WANTED)]
        residents.apply(plan(begin + 1, *sources), 1)
        begun = [files.begun.get(timeout=LIMIT_S) for _ in range(READERS)]
        assert files.begun.empty()
        for number in range(NUM_WANTED):
            files.allowed.release()
            read = told.get(timeout=LIMIT_S)
            assert read.error == ("no adapter found here" if read.digest == "2" else "")
            if number < NUM_WANTED - READERS:
                begun.append(files.begun.get(timeout=LIMIT_S))
        assert sorted(begun[:READERS]) + begun[READERS:] == [each.digest for each in sources]
        assert len(files.threads) == READERS
        while files.threads:
            thread = files.threads.pop()
            thread.join(LIMIT_S)
            assert not thread.is_alive()
