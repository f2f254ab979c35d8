"""The disk of a fake executor, which does everything as late as it may, and checks what it is told to write."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pagebus.bus.messages import DISK_FORGET, DISK_TELL, DiskReport, StepPlan

UNWRITTEN = 0


@dataclass
class FakeDisk:
    """Room for ``num_blocks`` blocks. Every so many orders (``fails``), one to read or to write fails; 0: none does."""

    num_blocks: int = 0
    fails: int = 0
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    num_orders: int = 0
    num_reports: int = 0

    def begin(self, host: np.ndarray, name: str, epoch: int) -> None:
        """An executor with these host blocks has it now."""
        self.orders: deque[tuple[StepPlan, int]] = deque()
        """Plans with orders that are not done, and the scheduler that gave them."""
        self._host, self._name, self._epoch = host, name, epoch

    def take(self, plan: StepPlan, scheduler_epoch: int) -> None:
        if plan.disk_order or plan.disk_reads or plan.disk_writes or plan.disk_drops:
            self.orders.append((plan, scheduler_epoch))

    def obey_one(self) -> DiskReport:
        """Do what the oldest plan with orders says."""
        plan, epoch = self.orders.popleft()
        found = tuple(self.stored) if plan.disk_order == DISK_TELL else ()
        for name in [*self.stored] if plan.disk_order == DISK_FORGET else plan.disk_drops:
            self.stored.pop(name, None)
        told: dict[str, list[str]] = {"read": [], "not_read": [], "written": [], "not_written": []}
        for name, host in zip(plan.disk_writes, plan.disk_write_hosts.tolist(), strict=True):
            assert (self._host[host] != UNWRITTEN).any(), f"host block {host} is stored but was never written"
            before = self.stored.get(name)
            assert before is None or (before == self._host[host]).all(), "a name stands for two contents"
            works = self._works()
            if works:
                self.stored[name] = self._host[host].copy()
            told["written" if works else "not_written"].append(name)
        for name, host in zip(plan.disk_reads, plan.disk_read_hosts.tolist(), strict=True):
            works = self._works() and name in self.stored
            self._host[host] = self.stored[name] if works else 13
            if not works:
                self.stored.pop(name, None)
            told["read" if works else "not_read"].append(name)
        assert len(self.stored) <= self.num_blocks, "more is stored than may be"
        self.num_reports += 1
        columns = {column: tuple(names) for column, names in told.items()}
        return DiskReport(
            replica=self._name, executor_epoch=self._epoch, scheduler_epoch=epoch, found=found, bytes_per_s=1e6,
            number=self.num_reports,
            **columns,
        )  # fmt: skip

    def _works(self) -> bool:
        self.num_orders += 1
        return not self.fails or self.num_orders % self.fails != 0
