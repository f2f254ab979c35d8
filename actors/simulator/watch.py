"""Watches a simulated run: its first executor for pictures, all of it for a recording."""

from __future__ import annotations

from typing import IO

import numpy as np

from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.simulator.deployment import Deployment
from pagebus.actors.simulator.drawing.plots import CACHED, MAX_MAP_BLOCKS, MAX_SAMPLES, Run
from pagebus.actors.simulator.recording.record import Recording
from pagebus.actors.simulator.simulation import Observer
from pagebus.bus.contract import Entry, EntryId
from pagebus.bus.messages import (
    Message,
    PullReport,
    ReplicaFenced,
    SequenceEnded,
    SequenceStarted,
    StepPlan,
    StepResult,
    TokenizedRequest,
)
from pagebus.bus.streams import Names


class Recorder(Observer):
    """Keeps what the pictures need, in bounded memory."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.replica = next(iter(deployment.simulation.members))
        self.samples = Run(self.replica)
        self._every = self._skipped = 1
        self._clients = deployment.clients

    def planned(self, at_s: float, replica: str, plan: StepPlan) -> None:
        if replica != self.replica or len(self.samples.steps) >= 10 * MAX_SAMPLES or not len(plan.slots):
            return
        decodes, prefill = np.split(plan.num_scheduled, [plan.num_decode_rows])
        self.samples.steps.append((int(decodes.sum()), int(prefill.sum())))

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        core = self.deployment.simulation.core
        if replica != self.replica or replica not in core.replicas:
            return
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._sample(at_s, core.replicas[replica])
        if len(self.samples.times) >= MAX_SAMPLES:
            self.samples.halve()
            self._every *= 2

    def _sample(self, at_s: float, replica: Replica) -> None:
        pool, run = replica.pool, self.samples
        run.has_blocks(pool.num_blocks)
        run.times.append(at_s)
        run.held.append(pool.num_blocks - pool.num_free)
        run.listed.append(len(replica.index))
        run.running.append(len(replica.slots))
        run.waiting.append(len(self.deployment.simulation.core.waiting))
        if pool.num_blocks <= MAX_MAP_BLOCKS:
            owners = np.zeros(pool.num_blocks, np.int32)
            owners[[block for block in range(pool.num_blocks) if block in replica.index]] = CACHED
            for sequence in reversed(replica.slots.occupied()):
                owners[sequence.pages] = sequence.order
            run.maps.append(owners)

    def run(self) -> Run:
        """Everything there is to draw."""
        named = {
            "time to first token": self._clients.ttft,
            "between tokens": self._clients.itl,
            "per token, mean of a request": self._clients.tpot,
        }
        curves = {name: [(value * 1e3, share) for value, share in values.curve()] for name, values in named.items()}
        self.samples.show_latencies(curves)
        return self.samples


class StepLog(Observer):
    """Writes what ``pagebus record`` would write of a real deployment that did the same, in virtual time."""

    def __init__(self, deployment: Deployment, out: IO[str]) -> None:
        self._names = Names()
        self._simulation = deployment.simulation
        self._lenders: dict[str, str] = {}
        self._num_lost = 0
        (joined, *_) = (member.executor.joined for member in deployment.simulation.members.values())
        self._recording = Recording(out, self._names, 0.0, joined.block_size, joined.num_blocks, self._lenders)

    def tokenized(self, at_s: float, request: TokenizedRequest) -> None:
        self._take(self._names.tokenized, request)

    def started(self, at_s: float, started: SequenceStarted) -> None:
        self._take(self._names.sequences(""), started)

    def ended(self, at_s: float, ended: SequenceEnded) -> None:
        self._take(self._names.sequences(""), ended)

    def planned(self, at_s: float, replica: str, plan: StepPlan) -> None:
        self._lose()
        if plan.pulls:
            self._lenders |= {member.address: name for name, member in self._simulation.members.items()}
        self._take(self._names.steps(replica), plan)

    def pulled(self, at_s: float, report: PullReport) -> None:
        self._take(self._names.control, report)

    def result(self, at_s: float, replica: str, result: StepResult) -> None:
        self._take(self._names.results(replica), result)

    def _lose(self) -> None:
        """Say which executors have gone since the last time."""
        for name, _ in self._simulation.past[self._num_lost :]:
            self._take(self._names.results(name), ReplicaFenced(replica=name, reason=""))
        self._num_lost = len(self._simulation.past)

    def _take(self, stream: str, message: Message) -> None:
        self._recording.take(Entry(stream, EntryId(self._simulation.core.config.epoch, 1), message))

    def finish(self) -> None:
        """The run is over."""
        self._lose()
        self._recording.finish()
