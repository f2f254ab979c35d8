"""The jobs actor: takes jobs from their stream, a window at a time, and writes their results.

An entry stays pending until its result is stored. The requests of a job are named after its entry. A job that is taken
up again, by this actor after a restart or by another, therefore joins its own request. The first of two actors to
answer a job completes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pagebus.actors.runtime.actor import Actor, describe
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.settings import Settings
from pagebus.bus.contract import Bus, BusError, BusUnavailable, Completion, Entry, EntryId
from pagebus.bus.messages import BatchQueued, Job, JobResult
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import BATCH_NAME, JOBS_GROUP, MAX_JOB_PRIORITY, address_of
from pagebus.web.ingress.adapter_registry import AdapterRegistry
from pagebus.web.ingress.inbox import Inbox
from pagebus.web.jobs.batches import GONE, BatchRun
from pagebus.web.jobs.holding import Holding
from pagebus.web.jobs.lines import Result, cancelled, custom_id_of, size_problem, unanswered
from pagebus.web.jobs.lost_batches import LostBatches
from pagebus.web.jobs.metrics import JobMetrics
from pagebus.web.jobs.settling import Outcome, Settling
from pagebus.web.jobs.window import STREAM, Window
from pagebus.web.jobs.worker import Worker
from pagebus.web.requests.served_model import ServedModel, cached_block_size, load_served_model
from pagebus.web.server.open_tracing import open_tracing
from pagebus.web.storage.files import OVER, Record, Store, open_store

if TYPE_CHECKING:
    from pagebus.web.telemetry.tracing import Tracing

READ_BLOCK_MS = 250
RETRY_S = 0.2
LOOK_S = 1.0
"""Seconds between checks for cancellations and for queue lengths."""
MAX_DELIVERIES = 20
"""A job that has been taken up so often without an end is given up: it may be what crashes its actors."""
LEAST_WINDOW = 16
RECORD_TRIES = 50
DISK_RETRY_S = 10.0
MAX_KEY_CHARS = 512


@dataclass(frozen=True, slots=True)
class Parts:
    """What a jobs actor works with, once it has its lease and knows the model."""

    metrics: JobMetrics
    outbox: Outbox
    tracing: Tracing | None
    inbox: Inbox
    worker: Worker


class JobsActor(Actor):
    """See the module's text. ``model`` as in :class:`pagebus.web.app.IngressActor`."""

    kind = "jobs"

    def __init__(self, settings: Settings, bus: Bus, name: str, *, model: ServedModel | None = None) -> None:
        super().__init__(settings, bus, name)
        self._model = model
        self.window = Window(settings.max_num_jobs or LEAST_WINDOW)
        self._settling = Settling(bus, self.names, self.log)
        self._bus_retry = BusRetry(self.log)
        self._holding = Holding(bus, self.names.jobs, name, self.log)
        self._next_look_s = self._next_read_s = 0.0
        self._has_more = False
        """Whether the last read of jobs filled the room there was."""
        self._store = open_store(settings)
        self._batches: dict[str, asyncio.Event] = {}
        """By id, the ends of the batches under way here."""
        self._lost_batches = (
            LostBatches(bus, self.names, self._store, lambda: self._batches, self.log) if self._store else None
        )
        self._parts: Parts | None = None

    @property
    def parts(self) -> Parts:
        """What it works with, once it has started."""
        assert self._parts is not None
        return self._parts

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        model = self._model or await load_served_model(self.settings, int(time.time()))
        address = address_of(self.name, self.epoch)
        metrics = JobMetrics(self.metrics, model.max_model_len)
        outbox = Outbox(self.bus, self.epoch)
        tracing = open_tracing(self.settings, model.name, self.log, queued=True)
        inbox = Inbox(
            self.bus, self.names, address, outbox, metrics, self.log, tracing,
            cache_block_size=cached_block_size(self.settings), stage=self.kind,
        )  # fmt: skip
        self._parts = Parts(metrics, outbox, tracing, inbox, Worker(model, inbox, address))
        await self._bus_retry.until_taken(lambda: self.bus.create_group(self.names.jobs, JOBS_GROUP), "group")
        for coro, name in (
            (outbox.run(), "outbox"),
            (inbox.mailbox.keep_for_ever(), "mailbox"),
            (inbox.run(), "inbox"),
            (self._settle(), "settle"),
            (self._look(), "look"),
            (AdapterRegistry(self.bus, self.settings, model.adapters, model.names).run(), "adapters"),
        ):
            self.spawn(coro, name)
        if self._lost_batches is not None:
            self.spawn(self._lost_batches.run(), "lost batches")

    async def serve(self) -> None:
        """Take jobs while there is room. A drain does not wait for them: other actors continue them."""
        while not self.draining.is_set():
            try:
                await self._take_over()
                await self._take()
                self._bus_retry.back()
            except BusUnavailable as error:
                await self._bus_retry.pause(error)

    def bus_restarted(self) -> None:
        """Retry the requests under way, some of which may be lost. So may what this actor had taken over."""
        if self._parts is not None:
            self._parts.inbox.mailbox.doubt(lost=True)
            self._holding.lapsed(self.settings.lease_ttl_s)
            if self._lost_batches is not None:
                self._lost_batches.doubt()

    def lease_lapsed(self) -> None:
        if self._parts is not None:
            self._parts.inbox.mailbox.doubt()
            self._holding.lapsed(self.settings.lease_ttl_s)

    async def stop(self) -> None:
        """Leave running jobs to the actor that takes them up."""
        if self._parts is None:
            return
        self._parts.worker.leave()
        await self._holding.stop()
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(self.settings.lease_ttl_s):
                await self._parts.outbox.flush()
        await self._parts.inbox.mailbox.forget()
        if self._parts.tracing is not None:
            await self._parts.tracing.stop()

    # -- taking jobs --------------------------------------------------------------------------------------------------

    async def _take_over(self) -> None:
        """Once per lease time: check the executors' load, and claim the entries of actors that have died."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_look_s:
            return
        leases = await self.bus.leases()
        if self.settings.max_num_jobs is None:
            seqs = [lease.info.get("max_num_seqs") for lease in leases if lease.kind == "executor"]
            self.window.resize(max(LEAST_WINDOW, 2 * sum(each for each in seqs if isinstance(each, int))))
        live = {lease.name for lease in leases if lease.kind == self.kind} | {self.name}
        for dead in sorted((await self.bus.consumers(self.names.jobs, JOBS_GROUP)).keys() - live):
            if claimed := await self.bus.claim(self.names.jobs, JOBS_GROUP, self.name, dead):
                self.log.warning("took over jobs of an actor that is gone", gone=dead, count=len(claimed))
                await self._begin(claimed)
        self._next_look_s = now_s + self.settings.lease_ttl_s

    async def _take(self) -> None:
        """Read as many jobs as there is room for. Beside batches that wait for room, poll now and then, and as long as
        there are more."""
        is_wanted, now_s = self.window.is_wanted, asyncio.get_running_loop().time()
        is_due = self._has_more or not is_wanted or now_s >= self._next_read_s
        if not is_due or not (room := self.window.room()):
            return await self.window.freed(LOOK_S, STREAM if is_due else None)
        block_ms = 0 if is_wanted else READ_BLOCK_MS
        entries = await self.bus.read_group(JOBS_GROUP, self.name, [self.names.jobs], count=room, block_ms=block_ms)
        self._has_more, self._next_read_s = len(entries) == room, now_s + LOOK_S
        await self._begin(entries)
        self.window.look_again()

    async def _begin(self, entries: Sequence[Entry]) -> None:
        entries = self._holding.begin(entries)
        jobs = [entry.message for entry in entries if isinstance(entry.message, Job)]
        unwanted = await self._cancelled_of({job.batch for job in jobs})
        for entry in entries:
            size = sum(map(len, (entry.raw or {}).values()))
            self.window.enter(size)
            if isinstance(entry.message, BatchQueued):
                self.window.leave(size)  # its lines will enter, one by one
                self.spawn(self._do_batch(entry, entry.message), "batch")
            elif not isinstance(entry.message, Job):
                result = unanswered(str(entry.id), None, "invalid_job", f"The entry is no job: {why_no_job(entry)}")
                self._finish(entry, Job(request="", reply_to=reply_to_of(entry)), result, "failed", size)
            elif problem := size_problem(entry.raw[b"request"] if entry.raw else b"", self.parts.worker.max_line_bytes):
                result = unanswered(str(entry.id), None, "invalid_job", problem)
                self._finish(entry, entry.message, result, "failed", size)
            elif entry.message.batch in unwanted:
                self._finish(entry, entry.message, cancelled(str(entry.id), entry.message.request), "cancelled", size)
            else:
                self.spawn(self._do(entry, entry.message, size), "job")

    def _trace_below(self, traceparent: str) -> None:
        """Traces of what the present task does lie below this span, if it is one."""
        if self.parts.tracing is not None:
            self.parts.tracing.arriving({"traceparent": traceparent})

    async def _do(self, entry: Entry, job: Job, size: int) -> None:
        """Process one job to its outcome."""
        self._holding.work(entry, job.batch)
        job_id, counter = str(entry.id), ""
        self._trace_below(job.traceparent)
        try:
            if problem := problem_of(job, entry.deliveries):
                result = unanswered(job_id, custom_id_of(job.request), "invalid_job", problem)
            else:
                result = await self.parts.worker.run(job_id, job.request, int(job.priority or 0))
        except asyncio.CancelledError:
            if self.parts.worker.leaving or self._holding.lets_go:  # others go on with it
                self.window.leave(size)
                raise
            result, counter = cancelled(job_id, job.request), "cancelled"
        except Exception as error:
            self.log.exception("job failed", id=job_id, error=describe(error))
            problem = "The job failed; the server's log has its id."
            result = unanswered(job_id, custom_id_of(job.request), "internal_error", problem)
        self._finish(entry, job, result, counter or ("failed" if result.failed else "completed"), size)

    async def _do_batch(self, entry: Entry, queued: BatchQueued) -> None:
        """Process a batch of ``/v1/batches`` to its end."""
        self._holding.work(entry, "")
        self._trace_below(queued.traceparent)
        while (ended := self._batches.get(queued.batch_id)) is not None:  # queued twice, or let go a moment ago
            await ended.wait()
        self._batches[queued.batch_id] = asyncio.Event()
        try:
            batch = await self._find_batch(queued.batch_id)
            if batch is None or self._store is None:
                problem = "a batch has no record here: is --files-dir the same folder everywhere?"
                self.log.error(problem, id=queued.batch_id)
            elif batch["status"] not in OVER:
                await self._run_batch(self._store, batch, entry)
        finally:
            self._batches.pop(queued.batch_id).set()
        if entry.id in self._holding:
            await self._settling.end(entry)
            self._holding.ended(entry.id)

    async def _run_batch(self, store: Store, batch: Record, entry: Entry) -> None:
        """A disk that is full is waited for; nothing else keeps a batch from its end."""
        while True:
            run = BatchRun(
                store, batch, self.parts.worker, self.window, self.settings.max_batch_lines, self.log,
                partial(self._is_ours, entry.id, batch["id"]), self.parts.metrics.outcome,
            )  # fmt: skip
            try:
                if entry.deliveries > MAX_DELIVERIES:
                    run.give_up("given_up", f"The batch was taken up {entry.deliveries} times without an end.")
                return await run.run()
            except FileNotFoundError:
                return run.fail(*GONE)
            except OSError as error:
                self.log.error("a batch waits for the disk", id=batch["id"], error=describe(error))
                await asyncio.sleep(DISK_RETRY_S)

    async def _is_ours(self, entry_id: EntryId, batch_id: str) -> bool:
        """Whether no other actor has taken the entry over, or even ended it; checked before files of a batch are
        written."""
        await self.confirm_lease()
        await self._bus_retry.until_taken(self._holding.look, "holders")
        if self._holding.is_nowhere(entry_id) and self._store is not None:
            record = await asyncio.to_thread(self._store.find, batch_id)
            if record is None or record["status"] in OVER:
                self._holding.let_go({entry_id})
        return entry_id in self._holding

    async def _find_batch(self, batch_id: str) -> Record | None:
        """The record of a batch, which is written a moment after the batch is queued."""
        for _ in range(RECORD_TRIES):
            found = None if self._store is None else await asyncio.to_thread(self._store.find, batch_id)
            if found is not None:
                return found
            await asyncio.sleep(RETRY_S)
        return None

    def _finish(self, entry: Entry, job: Job, result: Result, counter: str, size: int) -> None:
        batch = job.batch if BATCH_NAME.fullmatch(job.batch) else ""
        told = JobResult(result=result.text(), custom_id=result.custom_id or "", batch=batch, job=str(entry.id))
        stream = job.reply_to if 0 < len(job.reply_to) <= MAX_KEY_CHARS else self.names.job_results
        self.parts.metrics.outcome(counter)
        completion = Completion(entry, stream, told, self.names.batch(batch), counter if batch else "")
        self._settling.put(Outcome(completion, size))

    # -- beside it ----------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        while True:
            for outcome in await self._settling.settled():
                self.window.leave(outcome.size)
                self._holding.ended(outcome.completion.entry.id)

    async def _look(self) -> None:
        """Check for cancelled batches, and measure the queue."""
        while True:
            with contextlib.suppress(BusUnavailable):
                await self._holding.look(anew=True)
                self._holding.cancel(await self._cancelled_of(self._holding.batches))
                self.parts.metrics.queued.set(await self.bus.length(self.names.jobs))
                self.parts.metrics.running.set(self.window.jobs)
            if self.parts.tracing is not None:
                self.parts.tracing.tick()
            await asyncio.sleep(LOOK_S)

    async def _cancelled_of(self, batches: Iterable[str]) -> set[str]:
        """The cancelled ones of these batches."""
        names = [name for name in batches if BATCH_NAME.fullmatch(name)]
        try:  # without a timeout: entries that were read must be begun, since no other actor gets them
            found = await self._bus_retry.until_taken(
                lambda: self.bus.counters(*map(self.names.batch, names)), "batches"
            )
        except BusError as error:
            self.log.error("batches not looked at", error=describe(error))
            return set()
        return {name for name, counters in zip(names, found, strict=True) if counters.get("cancel")}


def problem_of(job: Job, deliveries: int) -> str:
    """The error in the fields beside the request; "" if there is none."""
    if deliveries > MAX_DELIVERIES:
        return f"The job was taken up {deliveries} times without an end, and is given up."
    if job.batch and not BATCH_NAME.fullmatch(job.batch):
        return "batch: may hold only letters, digits, '-', '_', '.' and ':', at most 128"
    if len(job.reply_to) > MAX_KEY_CHARS:
        return f"reply_to: must have at most {MAX_KEY_CHARS} characters"
    if job.priority and not re.fullmatch(r"-?[0-9]{1,9}", job.priority):
        return f"priority: must be an integer from -{MAX_JOB_PRIORITY} to {MAX_JOB_PRIORITY}"
    return ""


def why_no_job(entry: Entry) -> str:
    return entry.error if b"request" in (entry.raw or {}) else "it has no field `request`"


def reply_to_of(entry: Entry) -> str:
    """The stream of the result of an entry that is not a job."""
    return (entry.raw or {}).get(b"reply_to", b"").decode(errors="ignore")
