"""Takeover from the previous scheduler: reads its journal and results until no more can arrive.

Results of the old scheduler's plans may still be on their way. An executor executes plans in order, so the new
scheduler sends each a first, empty plan as a mark: its result is the first entry after everything old. If no executor
answers, a fence is written at the end of its results, after which its late writes are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from pagebus.actors.scheduler.recovery.journal import Ledger
from pagebus.actors.scheduler.sequence_output import SequenceOutput
from pagebus.actors.scheduler.service.lease_watch import check_leads
from pagebus.bus.contract import FENCE_INDEX, START, Bus, EntryId
from pagebus.bus.messages import (
    AlsoReads,
    Checkpoint,
    ReplicaFenced,
    RequestBlamed,
    RequestMoved,
    SequencesNamed,
    StepPlan,
    StepResult,
    TokenizedRequest,
)
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names

READ_COUNT = 512
READ_BLOCK_MS = 100
MARK_STEP = 1
"""The step number of the empty plan; the executors' next step is the one after it."""


@dataclass(slots=True)
class _Open:
    """A replica whose results are being read. ``executor_epoch``: of the executor that wrote them, 0 if unknown, in
    which case there are none. ``marked``: it has been sent a plan to answer. ``fenced``: nothing can follow its last
    entry."""

    position: EntryId
    executor_epoch: int
    marked: bool = False
    fenced: bool = False

    @property
    def fence(self) -> EntryId:
        return EntryId(self.executor_epoch, FENCE_INDEX)

    @property
    def closed(self) -> bool:
        """Whether its end has been read, or an entry of a later executor."""
        return self.position >= self.fence


class Takeover:
    """One takeover. Afterwards ``ledger`` is complete, ``read`` has the position up to which each replica's results
    were read, ``journal_end`` is the journal's last entry, and ``marks`` has the replicas that were sent a plan, with
    their executors' epochs."""

    def __init__(self, bus: Bus, names: Names, outbox: Outbox) -> None:
        self.ledger = Ledger()
        self.read: dict[str, EntryId] = {}
        self.marks: dict[str, int] = {}
        self.journal_end = START
        self._bus = bus
        self._names = names
        self._outbox = outbox
        self._open: dict[str, _Open] = {}

    async def run(self) -> None:
        """Read everything.

        Raises:
            BusUnavailable: it may be run again.
            Fenced: a later scheduler has led since.
        """
        self.ledger, self.read = Ledger(), {}
        await self._read_journal()
        epochs = self.ledger.epochs
        self._open = {name: _Open(at, epochs.get(name, 0)) for name, at in self.ledger.positions.items()}
        for replica, epoch in (await self._ready()).items():
            marked = self._mark(replica, epoch)
            state = self._open.setdefault(replica, _Open(START, marked))
            state.executor_epoch, state.marked = marked, marked == epoch
        while self._open:
            await self._fence_lost()
            await self._read_results()

    async def _ready(self) -> dict[str, int]:
        """Epochs of the executors that answer plans."""
        leases = await self._bus.leases("executor")
        check_leads(leases, self._outbox.epoch)
        return {lease.name: lease.epoch for lease in leases if lease.info.get("state") == "ready"}

    def _mark(self, replica: str, executor_epoch: int) -> int:
        """The epoch of the executor that was sent the mark: an earlier run may have found another one."""
        if replica not in self.marks:
            self.marks[replica] = executor_epoch
            plan = StepPlan(step=MARK_STEP, planned_s=0.0, num_decodes=0, executor_epoch=executor_epoch)
            self._outbox.append(self._names.steps(replica), plan)
        return self.marks[replica]

    async def _read_journal(self) -> None:
        self.journal_end = START
        while entries := await self._bus.read({self._names.journal: self.journal_end}, count=READ_COUNT, block_ms=0):
            for entry in entries:
                self.journal_end = entry.id
                if isinstance(entry.message, Checkpoint | SequencesNamed | RequestMoved | RequestBlamed):
                    self.ledger.read(entry.message)

    async def _fence_lost(self) -> None:
        """Close the results of replicas whose executors will not answer."""
        ready = await self._ready()
        for replica, state in list(self._open.items()):
            if state.closed or not state.executor_epoch:
                self._close(replica)
            elif not state.fenced and (not state.marked or ready.get(replica) != state.executor_epoch):
                await self._bus.revoke_lease("executor", replica)  # should it only be frozen
                fence = ReplicaFenced(replica=replica, reason="its executor was lost with the scheduler")
                self._outbox.append_at(self._names.results(replica), state.fence, fence)
                await self._outbox.stored(self._outbox.queued)
                state.fenced = True

    async def _read_results(self) -> None:
        streams = {self._names.results(replica): replica for replica in self._open}
        if not streams:
            return
        positions = {stream: self._open[replica].position for stream, replica in streams.items()}
        entries = await self._bus.read(positions, count=READ_COUNT, block_ms=READ_BLOCK_MS)
        for stream in streams.keys() - {entry.stream for entry in entries}:
            silent = self._open[streams[stream]]
            if silent.fenced:  # before, too, by an entry that has been read and trimmed
                silent.position = silent.fence
        for entry in entries:
            replica = streams[entry.stream]
            state = self._open.get(replica)
            if state is None:
                continue  # its mark was among these entries
            state.position = entry.id
            match entry.message:
                case StepResult(scheduler_epoch=epoch) if epoch == self._outbox.epoch:
                    self._close(replica)
                case StepResult():
                    self.ledger.add_result(entry.message)
                case _:
                    pass

    def _close(self, replica: str) -> None:
        self.read[replica] = self._open.pop(replica).position


class Recovered:
    """Recovered state of requests, until each is readmitted."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._moved = ledger.moved if ledger is not None else {}
        self._outputs = ledger.outputs() if ledger is not None else {}

    def __len__(self) -> int:
        """Requests with recovered output."""
        return len(self._outputs)

    def claim(
        self, request: TokenizedRequest
    ) -> tuple[TokenizedRequest, tuple[AlsoReads, ...], dict[int, SequenceOutput]]:
        """The request with its client's latest ingress, its other readers, and its recovered output by choice. The
        journal may be older than this entry, if the arrival of the entry was not recorded any more."""
        outputs = self._outputs.pop(request.request_id, {})
        moved = self._moved.pop(request.request_id, None)
        if moved is None:
            return request, (), outputs
        known = AlsoReads(ingress=moved.ingress, attempt=moved.attempt, asked=moved.asked)
        if moved.asked >= request.asked:
            request = replace(request, ingress=known.ingress, attempt=known.attempt, asked=known.asked)
            return request, moved.others, outputs
        others = (known, *moved.others) if request.shared else ()
        return request, tuple(each for each in others if each.ingress != request.ingress), outputs
