"""The disk tier of an executor: threads that write host blocks to files and read them back, as plans order.

Plans wait for none of this. A thread touches a host block only once the copies of the plan with the order, and all
before it, are done (:class:`pagebus.bus.messages.StepPlan`). The scheduler leaves the block alone until it has read the
report. All orders for one name go to one thread, so they keep their order. A disk that fails costs speed only: what
cannot be read is reported so, and computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pagebus.actors.executor.batch import checks
from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.memory.disk_files import DiskError, DiskFiles
from pagebus.actors.executor.memory.host_memory import HostMemory
from pagebus.bus.messages import DISK_FORGET, DISK_TELL, DiskReport, StepPlan

NUM_THREADS = 8
NAMES_PER_REPORT = 4096
PAUSE_LIMIT_S = 60.0
"""Longest wait for a file operation when another scheduler begins: a disk that hangs for longer ends the engine."""
_POLL_S = 0.001


@dataclass(slots=True, eq=False)
class Group:
    """Orders of one kind in one plan, of which ``left`` are not done yet. ``reads``: whether files are read, or else
    written; None: they are deleted."""

    left: int
    scheduler_epoch: int
    reads: bool | None
    ready: torch.cuda.Event | None = None
    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    began_s: float = 0.0


_Orders = queue.SimpleQueue[tuple[Group, str, int] | None]


class DiskTier:
    """``num_blocks`` is the most files that there may be. ``tell`` gets reports, which is for its actor to complete;
    from any thread."""

    def __init__(
        self, files: DiskFiles, memory: HostMemory, num_blocks: int, tell: Callable[[DiskReport], None]
    ) -> None:
        self.num_blocks = num_blocks
        self._files, self._memory, self._tell = files, memory, tell
        self._names = dict.fromkeys(files.contents(num_blocks))
        """What is there, the one used longest ago first."""
        self._epoch = 0
        self._busy = 0
        self._closing = False
        self._warned: set[bool] = set()
        self._lock = threading.Lock()
        self._queues: list[_Orders] = [queue.SimpleQueue() for _ in range(NUM_THREADS)]
        self._threads = [
            threading.Thread(target=self._work, args=(each,), name=f"disk-{number}", daemon=True)
            for number, each in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def apply(self, plan: StepPlan, scheduler_epoch: int, mark: Callable[[], torch.cuda.Event | None]) -> None:
        """Take a plan's orders. Device thread, behind the plan's copies; ``mark`` makes an event behind these.

        Raises:
            PlanError: a host block does not exist.
            EngineError: the disk hangs.
        """
        if scheduler_epoch != self._epoch:
            self._epoch = scheduler_epoch
            self._rest()
        if not (plan.disk_order or plan.disk_reads or plan.disk_writes or plan.disk_drops):
            return
        checks.disk(plan, self._memory.num_ready)
        dropped = list(plan.disk_drops)
        if plan.disk_order == DISK_TELL:
            self._tell_contents()
        elif plan.disk_order == DISK_FORGET:
            with self._lock:
                dropped += self._names
        ready = mark() if plan.disk_reads or plan.disk_writes else None
        self._order(Group(len(dropped), scheduler_epoch, None), dropped, [0] * len(dropped))
        writes = Group(len(plan.disk_writes), scheduler_epoch, False, ready)
        self._order(writes, plan.disk_writes, plan.disk_write_hosts.tolist())
        reads = Group(len(plan.disk_reads), scheduler_epoch, True, ready)
        self._order(reads, plan.disk_reads, plan.disk_read_hosts.tolist())

    def close(self) -> None:
        """Finish what is written, skip what is to be read, and end the threads. No plan follows."""
        self._closing = True
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join()
        self._files.close()

    def _order(self, group: Group, names: list[str] | tuple[str, ...], hosts: list[int]) -> None:
        with self._lock:
            self._busy += len(names)
        for name, host in zip(names, hosts, strict=True):
            self._queues[int(name[:8], 16) % NUM_THREADS].put((group, name, host))

    def _rest(self) -> None:
        """Wait until no file is read or written: another scheduler knows nothing of the host blocks in use."""
        deadline_s = time.monotonic() + PAUSE_LIMIT_S
        while self._busy:
            if time.monotonic() > deadline_s:
                raise EngineError(f"the disk of --disk-cache-dir has not answered for {PAUSE_LIMIT_S:.0f} s")
            time.sleep(_POLL_S)

    def _tell_contents(self) -> None:
        with self._lock:
            found = list(self._names)
        for start in range(0, max(1, len(found)), NAMES_PER_REPORT):
            self._tell(_report(self._epoch, found=tuple(found[start : start + NAMES_PER_REPORT])))

    # -- the threads --------------------------------------------------------------------------------------------------
    def _work(self, orders: _Orders) -> None:
        while (order := orders.get()) is not None:
            group, name, host = order
            outdated = group.scheduler_epoch != self._epoch
            if group.reads is None:
                self._drop(name)
            elif not outdated and not (group.reads and self._closing):
                self._move(group, name, host)
            with self._lock:
                self._busy -= 1

    def _drop(self, name: str) -> None:
        with self._lock:
            self._names.pop(name, None)
        self._files.drop(name)

    def _move(self, group: Group, name: str, host: int) -> None:
        """Read or write one file, and report if it is the last one of its group."""
        error, reads = "", bool(group.reads)
        try:
            if group.ready is not None:
                group.ready.synchronize()
            group.began_s = group.began_s or time.perf_counter()
            block = self._memory.block(host).data
            (self._files.read if reads else self._files.write)(name, block)
        except DiskError as problem:
            error = str(problem)
        except Exception as problem:  # whatever the system may say: the block is computed
            error = f"{type(problem).__name__}: {problem}"
        with self._lock:
            self._names.pop(name, None)
            if not error:
                self._names[name] = None
            (group.failed if error else group.done).append(name)
            group.left -= 1
            is_last = not group.left
            is_first = bool(error) and reads not in self._warned
            if is_first:
                self._warned.add(reads)
        if is_first:
            text = f"{'reading' if reads else 'writing'} failed: {error}"
            self._tell(_report(group.scheduler_epoch, error=text))
        if is_last:
            self._tell_group(group)

    def _tell_group(self, group: Group) -> None:
        done, failed = tuple(group.done), tuple(group.failed)
        if not group.reads:
            self._tell(_report(group.scheduler_epoch, written=done, not_written=failed))
            return
        rate = len(done) * self._memory.block_bytes / max(time.perf_counter() - group.began_s, 1e-9)
        self._tell(_report(group.scheduler_epoch, read=done, not_read=failed, bytes_per_s=rate))


def _report(scheduler_epoch: int, **told: str | float | tuple[str, ...]) -> DiskReport:
    """Which replica says so is for its actor to add."""
    return DiskReport(replica="", executor_epoch=0, scheduler_epoch=scheduler_epoch, **told)  # type: ignore[arg-type]
