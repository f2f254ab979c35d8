"""Ranks that are threads of the test: what they exchange passes through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from pagebus.actors.executor.device.comm import Comm
from pagebus.actors.executor.device.errors import EngineError
from tests.helpers.waiting import LIMIT_S

T = TypeVar("T")
Call = tuple[tuple[int, ...], str]


class Meeting:
    """Where ``size`` threads meet; when one has failed, nobody waits for it."""

    def __init__(self, size: int) -> None:
        self.there: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)


class ThreadComm(Comm):
    """One of the ranks. ``calls`` are its exchanges so far: shape and number format."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting
        self.calls: list[Call] = []

    def connect(self) -> None:
        """All are here."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((tuple(x.shape), str(x.dtype)))
        try:
            self._meeting.there[self.rank] = x.clone()
            self._meeting.barrier.wait()
            there = list(self._meeting.there)
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise EngineError(f"rank {self.rank} of {self.size} has lost another rank") from error
        if any(each.shape != x.shape or each.dtype != x.dtype for each in there):
            raise EngineError(f"ranks exchange different things: {[tuple(each.shape) for each in there]}")
        return torch.stack(there)

    def close(self) -> None:
        """Who waits for this rank hears of it."""
        self._meeting.barrier.abort()


def thread_comms(world: int) -> list[ThreadComm]:
    """The ranks of a group."""
    meeting = Meeting(world)
    return [ThreadComm(rank, world, meeting) for rank in range(world)]


def together(world: int, work: Callable[[ThreadComm], T]) -> list[T]:
    """What each rank makes of ``work``, in the order of ranks. All have exchanged the same."""
    comms = thread_comms(world)

    def run(comm: ThreadComm) -> T:
        try:
            return work(comm)
        except BaseException:
            comm.close()
            raise

    with ThreadPoolExecutor(world) as pool:
        told = list(pool.map(run, comms))
    assert all(comm.calls == comms[0].calls for comm in comms)
    return told
