"""How a scheduler takes over from the one before it: reads what that one left until nothing more can come.

Results of the old scheduler's plans may still be on their way. An executor executes plans in order, so a first, empty
plan of the new scheduler is a mark: its result is the first entry after everything of the old one. Where no executor
answers, a fence is put at the end of its results, after which a late write of it is refused.
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
"""The step number of the empty plan; the executors' next is the one after it."""


@dataclass(slots=True)
class _Open:
    """A replica whose results are being read. ``executor_epoch``: of the executor that writes them, or did; 0 if it has
    never been heard of, so that there is nothing of it. ``marked``: it has been sent a plan to answer. ``fenced``:
    nothing can follow what is there."""

    position: EntryId
    executor_epoch: int
    marked: bool = False
    fenced: bool = False

    @property
    def fence(self) -> EntryId:
        return EntryId(self.executor_epoch, FENCE_INDEX)

    @property
    def closed(self) -> bool:
        """Its end has been read, or something of an executor after it."""
        return self.position >= self.fence


class Takeover:
    """See the module's text. Afterwards ``ledger`` is complete, ``read`` says how far each replica's results have been
    read, ``journal_end`` where the journal ends, and ``marks`` are the replicas that have been sent a plan, with the
    epochs of their executors then."""

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
        """The epoch of the executor that has been sent the plan: a run before this one may have found another."""
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
        """Close the results of replicas whose executor will not answer (any more)."""
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
    """What a predecessor's ledger says of requests, until each is taken in again."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._moved = ledger.moved if ledger is not None else {}
        self._outputs = ledger.outputs() if ledger is not None else {}

    def __len__(self) -> int:
        """Requests whose output had begun."""
        return len(self._outputs)

    def claim(
        self, request: TokenizedRequest
    ) -> tuple[TokenizedRequest, tuple[AlsoReads, ...], dict[int, SequenceOutput]]:
        """The request as its client, who may have moved, wants it now; who else reads it; and its output by choice, as
        far as it goes. (What the journal knows of clients may be older than this entry: that it came here was not
        stored any more.)"""
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
