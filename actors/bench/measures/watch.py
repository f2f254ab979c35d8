"""Runs requests on a deployment and watches its streams: every step, and when every token was there.

A pure reader beside scheduler and detokenizers. Times are the stamps in plans and results: a token is there when the
executor has it on the host.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagebus.actors.bench.driver.deployment import BenchError, Deployment
from pagebus.actors.bench.driver.requests import INGRESS
from pagebus.actors.runtime.actor import metrics_state
from pagebus.actors.simulator.recording.record import plan_work
from pagebus.bus.contract import START, Entry, EntryId
from pagebus.bus.messages import (
    END_NONE,
    GenerateRequest,
    Int32Array,
    RequestFailed,
    RequestsDone,
    SequenceStarted,
    StepPlan,
    StepResult,
)

Floats = NDArray[np.float64]
READ_COUNT = 2000
READ_BLOCK_MS = 1000
BUSY = "pagebus:scheduler_busy_seconds_total"
SETTLED_S = 0.1
"""After the last step, by when the scheduler has counted its part of it."""
POLL_S = 0.05
SILENCE_S = 120.0
"""Without any step, or word of the scheduler, for so long, a run is given up."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step that computed something; times are seconds of the wall clock."""

    number: int
    planned_s: float
    received_s: float
    launched_s: float
    done_s: float
    busy_s: float
    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_pairs: float
    num_sampled: int

    @property
    def num_tokens(self) -> int:
        return self.decodes + self.prefill_tokens


@dataclass(slots=True)
class Run:
    """What was seen of one set of requests: its steps, and its tokens as columns [n]."""

    submitted_s: float
    prompt_tokens: int
    steps: list[Step]
    requests: Int32Array
    """Which request the token is of: its index among the submitted ones."""
    token_indexes: Int32Array
    token_s: Floats
    cached_tokens: int
    scheduler_s: float | None
    """Seconds that the scheduler worked for these requests, if that was asked for."""


class Watch:
    """Reads the streams of one deployment while requests run on it; one run at a time."""

    def __init__(self, deployment: Deployment) -> None:
        names = deployment.names
        self._deployment = deployment
        self._steps, self._results = names.steps(deployment.executor), names.results(deployment.executor)
        self._replies = names.replies(INGRESS)
        # In this order, so that a sequence is known before its tokens.
        self._streams = [*map(names.sequences, deployment.detokenizers), self._steps, self._results]
        self._slots: dict[int, int] = {}
        self._last_step_s = 0.0
        """When the last step of the last run was done."""
        self._begin(())

    async def run(self, requests: Sequence[GenerateRequest], *, scheduler: bool = False) -> Run:
        """Submit all at once and follow them to their last token. To know what the ``scheduler`` did takes up to
        a second more before and after, until it publishes its metrics.

        Raises:
            BenchError: a request failed, or nothing happens any more, or the streams were cut before they were read.
        """
        bus = self._deployment.bus
        busy_s = await self._scheduler_busy_s() if scheduler else 0.0
        positions = {stream: await bus.last_id(stream) for stream in self._streams}
        self._begin(requests)
        submitted_s = time.time()
        # Each by itself, as clients send them: what is published together is there when all of it is.
        await asyncio.gather(*(bus.publish([(self._deployment.names.requests, request)]) for request in requests))
        heard_s = time.monotonic()
        while self._num_left:
            entries = await bus.read(positions, count=READ_COUNT, block_ms=READ_BLOCK_MS)
            for entry in entries:
                self._check_order(entry, positions[entry.stream])
                positions[entry.stream] = entry.id
                self._take(entry)
            if entries:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > SILENCE_S:
                raise BenchError(f"nothing has happened for {SILENCE_S:.0f} s; {self._num_left} requests are open")
            else:
                await self._look_for_failures()
        await bus.delete(self._replies)
        await self._confirm(requests)
        self._last_step_s = self._done[-1].done_s
        columns = [np.concatenate(column) for column in zip(*self._tokens, strict=True)]
        return Run(
            submitted_s=submitted_s,
            prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
            steps=self._done,
            requests=np.array([self._index_of[int(sequence)] for sequence in columns[0]], np.int32),
            token_indexes=columns[1],
            token_s=columns[2],
            cached_tokens=self._cached_tokens,
            scheduler_s=await self._scheduler_busy_s() - busy_s if scheduler else None,
        )

    async def _confirm(self, requests: Sequence[GenerateRequest]) -> None:
        """Say what an ingress says of answers that their clients have: until then the scheduler keeps them, and sums
        them up every second."""
        names = tuple(request.request_id for request in requests)
        done = RequestsDone(request_ids=names, attempts=tuple(request.attempt for request in requests))
        await self._deployment.bus.publish([(self._deployment.names.control, done)])

    def _begin(self, requests: Sequence[GenerateRequest]) -> None:
        """Watch these, and forget the run before."""
        self._numbers = {request.request_id: index for index, request in enumerate(requests)}
        self._index_of: dict[int, int] = {}
        self._planned: dict[int, tuple[float, dict[str, float]]] = {}
        self._done: list[Step] = []
        self._tokens: list[tuple[Int32Array, Int32Array, Floats]] = []
        self._cached_tokens = 0
        self._heard = START
        self._num_left = len(requests)

    def _check_order(self, entry: Entry, last: EntryId) -> None:
        """Entries of log streams are numbered without gaps; a gap means that they were trimmed before we read them."""
        if entry.id.epoch == last.epoch and entry.id.index > last.index + 1 and entry.stream in self._streams[-2:]:
            raise BenchError(f"{entry.stream} was trimmed from {last} to {entry.id} unread: this machine is too slow")

    def _take(self, entry: Entry) -> None:
        match entry.message:
            case SequenceStarted() as started if started.request_id in self._numbers:
                self._index_of[started.sequence_id] = self._numbers[started.request_id]
                self._cached_tokens += started.num_cached_tokens
            case StepPlan() as plan:
                self._planned[plan.step] = (plan.planned_s, plan_work(self._slots, plan))
            case StepResult() as result:
                self._take_result(result)
            case _:
                pass

    def _take_result(self, result: StepResult) -> None:
        planned_s, work = self._planned.pop(result.step, (0.0, {}))
        if result.num_computed_tokens and work:
            self._done.append(
                Step(
                    number=result.step,
                    planned_s=planned_s,
                    received_s=result.received_s,
                    launched_s=result.launched_s,
                    done_s=result.done_s,
                    busy_s=result.busy_s,
                    decodes=int(work["decodes"]),
                    decode_context=int(work["decode_context"] or 0),
                    prefill_tokens=int(work["prefill_tokens"]),
                    prefill_pairs=work["prefill_pairs"],
                    num_sampled=len(result.token_ids),
                )
            )
        mine = np.array([int(sequence) in self._index_of for sequence in result.sequence_ids], np.bool_)
        if mine.any():
            times = np.full(int(mine.sum()), result.done_s)
            self._tokens.append((result.sequence_ids[mine], result.token_indexes[mine], times))
            self._num_left -= int(np.count_nonzero(result.ends[mine] != END_NONE))

    async def _look_for_failures(self) -> None:
        while entries := await self._deployment.bus.read({self._replies: self._heard}, count=READ_COUNT, block_ms=0):
            self._heard = entries[-1].id
            for entry in entries:
                if not isinstance(entry.message, RequestFailed):
                    continue
                raise BenchError(f"request {entry.message.request_id} failed: {entry.message.message}")

    async def _scheduler_busy_s(self) -> float:
        """The scheduler's own count of the seconds it worked, the last run included.

        Raises:
            BenchError: the scheduler publishes no metrics any more.
        """
        state = metrics_state("scheduler", self._deployment.scheduler)
        with_last_step_s, deadline_s = self._last_step_s + SETTLED_S, time.monotonic() + SILENCE_S
        while time.monotonic() < deadline_s:
            snapshot: Any = (await self._deployment.bus.get_state(state))[0]
            if snapshot is not None and snapshot["time_s"] >= with_last_step_s:
                return float(sum(data["value"] for name, _, data in snapshot["series"] if name == BUSY))
            await asyncio.sleep(POLL_S)
        raise BenchError(f"the scheduler has not published its metrics for {SILENCE_S:.0f} s")
