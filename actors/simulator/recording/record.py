"""Writes down what a running deployment does: its requests as a trace, and a log of its steps.

A pure reader: it joins no group, acks nothing and trims nothing; it only reads streams from their ends on, like one
more detokenizer would. ``tokenized`` is deleted as the scheduler takes it in, so an entry may be missed there; whatever
starts is seen again in ``sequences`` and ``steps``, which are kept for a while. What was refused or aborted before it
started may be missing in the trace.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from pagebus.actors.model.block_hash import ROOT, hash_blocks, hashes_from_array
from pagebus.actors.runtime.process import make_bus
from pagebus.actors.settings import Settings
from pagebus.actors.simulator.recording.pulls import PullLog
from pagebus.actors.simulator.recording.trace import open_text
from pagebus.bus.contract import Bus, BusUnavailable, Entry, EntryId
from pagebus.bus.messages import (
    END_NONE,
    Int32Array,
    NewSequence,
    PullReport,
    ReplicaFenced,
    SequenceEnded,
    SequenceStarted,
    StepPlan,
    StepResult,
    TokenizedRequest,
)
from pagebus.bus.streams import Names

LOOK_S = 0.5
READ_BLOCK_MS = 200
MAX_PENDING_STEPS = 4096


@dataclass(slots=True)
class _Sequence:
    request: _Request
    num_output: int = 0
    over: bool = False
    """Ended, or out of its slot when the recording ended."""


@dataclass(slots=True)
class _Request:
    arrived_s: float
    max_tokens: int
    num_prompt: int
    tokenized: TokenizedRequest | None = None
    blocks: list[bytes] = field(default_factory=list)
    sequences: list[_Sequence] = field(default_factory=list)


@dataclass(slots=True)
class _Replica:
    """The persistent batch as far as it is known, and the plans whose results have not come."""

    sequences: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    pending: deque[tuple[StepPlan, dict[str, Any]]] = field(default_factory=deque)
    contents: dict[int, bytes] = field(default_factory=dict)
    """By block, the hash that it had in the newest prompt with it."""


class Recording:
    """Takes entries of streams in; writes lines to ``out``. Times are seconds after ``start_s``. ``lenders`` has the
    names of executors by the addresses of their caches; those of later ones may be added to it."""

    def __init__(
        self, out: IO[str], names: Names, start_s: float, block_size: int, num_blocks: int = 0,
        lenders: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.num_requests = self.num_steps = 0
        self._out, self._names, self._start_s, self._block_size = out, names, start_s, block_size
        self._tokenized: dict[str, TokenizedRequest] = {}
        self._requests: dict[str, _Request] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._replicas: dict[str, _Replica] = {}
        self._block_numbers: dict[bytes, int] = {}
        self.pulls = PullLog(self._write, start_s, {} if lenders is None else lenders)
        head = {"pagebus_trace": 1, "block_size": block_size, "started_s": round(start_s, 3)}
        self._write(head | ({"num_blocks": num_blocks} if num_blocks else {}))

    def take(self, entry: Entry) -> None:
        """One entry of a stream."""
        match entry.message:
            case TokenizedRequest() as tokenized:
                self._tokenized[tokenized.request_id] = tokenized
                if len(self._tokenized) > MAX_PENDING_STEPS:
                    del self._tokenized[next(iter(self._tokenized))]
            case SequenceStarted() as started:
                self._start(started)
                if started.output_end != END_NONE:  # it comes as a whole: a beam, which no result names
                    self._sequences[started.sequence_id].num_output = len(started.output_token_ids)
                    self._end(started.sequence_id)
            case SequenceEnded() as ended:
                self._end(ended.sequence_id)
            case StepPlan() as plan:
                self._plan(self._replica(entry.stream, self._names.steps("")), plan)
                self.pulls.plan(entry.stream.removeprefix(self._names.steps("")), entry.id.epoch, plan)
            case StepResult() as result:
                name = entry.stream.removeprefix(self._names.results(""))
                self._result(name, self._replica(entry.stream, self._names.results("")), result)
            case PullReport() as report:
                self.pulls.report(report)
            case ReplicaFenced() as fenced:
                self.pulls.lose(fenced.replica)
            case _:
                pass

    def _replica(self, stream: str, prefix: str) -> _Replica:
        return self._replicas.setdefault(stream.removeprefix(prefix), _Replica())

    # -- requests -----------------------------------------------------------------------------------------------------
    def _start(self, started: SequenceStarted) -> None:
        request = self._requests.get(started.request_id)
        if request is None:
            request = _Request(started.arrived_s, started.max_tokens, started.num_prompt_tokens)
            request.tokenized = self._tokenized.pop(started.request_id, None)
            if request.tokenized is not None:
                request.blocks = hashes_from_array(request.tokenized.block_hashes)
            self._requests[started.request_id] = request
        sequence = _Sequence(request)
        request.sequences.append(sequence)
        self._sequences[started.sequence_id] = sequence

    def _enter(self, replica: _Replica, new: NewSequence, tokens: Int32Array, blocks: Int32Array) -> None:
        sequence = self._sequences.get(new.sequence_id)
        if sequence is None:
            return
        sequence.over = False
        request = sequence.request
        if not request.blocks:  # of a request that was not seen, or without prefix caching
            count = new.first_token // self._block_size  # whose tokens are not said, but they were those of another
            known = [replica.contents.get(block, b"%16d" % block) for block in blocks[:count].tolist()]
            tokens = tokens[: new.num_prompt_tokens - new.first_token]
            request.blocks = known + hash_blocks(tokens, self._block_size, parent=known[-1] if known else ROOT)
        replica.contents.update(zip(blocks.tolist(), request.blocks[new.first_block :], strict=False))

    def _end(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        sequence.over = True
        request = sequence.request
        expected = request.tokenized.sampling.n if request.tokenized is not None else len(request.sequences)
        if len(request.sequences) >= expected and all(each.over for each in request.sequences):
            self._write_request(request)

    def _write_request(self, request: _Request) -> None:
        for name in [name for name, each in self._requests.items() if each is request]:
            del self._requests[name]
        numbers = self._block_numbers
        row: dict[str, Any] = {
            "arrival_s": round(max(0.0, request.arrived_s - self._start_s), 6),
            "prompt_tokens": request.num_prompt,
            "output_tokens": max(1, *(each.num_output for each in request.sequences)),
            "max_tokens": request.max_tokens,
            "blocks": [numbers.setdefault(each, len(numbers)) for each in request.blocks],
        }
        if len(request.sequences) > 1:
            row["n"] = len(request.sequences)
        if request.tokenized is not None and request.tokenized.priority:
            row["priority"] = request.tokenized.priority
        if request.tokenized is not None and request.tokenized.is_job:
            row["job"] = 1
        self.num_requests += 1
        self._write(row)

    # -- steps --------------------------------------------------------------------------------------------------------
    def _plan(self, replica: _Replica, plan: StepPlan) -> None:
        for slot in plan.freed_slots.tolist():
            sequence = self._sequences.get(replica.sequences.pop(slot, 0))
            if sequence is not None:
                sequence.over = True  # unless it comes back
        tokens, blocks = plan.new_token_ids, plan.new_block_ids
        for new in plan.new_sequences:
            replica.sequences[new.slot] = new.sequence_id
            said = new.num_tokens - new.first_token
            self._enter(replica, new, tokens[:said], blocks[: new.num_blocks])
            tokens, blocks = tokens[said:], blocks[new.num_blocks :]
        replica.pending.append((plan, plan_work(replica.computed, plan) | _tables(plan)))
        if len(replica.pending) > MAX_PENDING_STEPS:  # of an executor that is gone
            replica.pending.popleft()

    def _result(self, name: str, replica: _Replica, result: StepResult) -> None:
        for sequence_id, end in zip(result.sequence_ids.tolist(), result.ends.tolist(), strict=True):
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            sequence.num_output += 1
            if end != END_NONE:
                self._end(sequence_id)
        while replica.pending and replica.pending[0][0].step < result.step:
            replica.pending.popleft()
        if not replica.pending or replica.pending[0][0].step != result.step:
            return
        plan, work = replica.pending.popleft()
        times = {"planned_s": plan.planned_s, "received_s": result.received_s}
        times |= {"launched_s": result.launched_s, "done_s": result.done_s}
        self.num_steps += 1
        self._write(
            {"step": result.step, "replica": name}
            | {key: round(value - self._start_s, 6) for key, value in times.items()}
            | {"busy_s": round(result.busy_s, 6)}
            | work
        )

    # -- the end ------------------------------------------------------------------------------------------------------
    def finish(self) -> int:
        """Write the requests that are not known to have ended; returns how many of them were cut short."""
        cut = 0
        for request in list(self._requests.values()):
            cut += not all(each.over for each in request.sequences)
            self._write_request(request)
        self.pulls.finish()
        self._out.flush()
        return cut

    def _write(self, row: dict[str, Any]) -> None:
        self._out.write(json.dumps(row, separators=(",", ":")) + "\n")


def plan_work(slots: dict[int, int], plan: StepPlan) -> dict[str, Any]:
    """What one plan computes: tokens and pairs. ``decode_context`` is None where sequences ran before the recording.

    Drafts are tokens of decodes. Behind drafts in flight, a row counts from the latest place where it may begin.

    ``slots`` holds the computed tokens of every slot that is known, and is brought up to date.
    """
    for slot in plan.freed_slots.tolist():
        slots.pop(slot, None)
    for new in plan.new_sequences:
        slots[new.slot] = new.num_computed_tokens
    slots.update(zip(plan.slots.tolist(), plan.latest_starts.tolist(), strict=False))
    num_decodes, context, pairs, known = plan.num_decode_rows, 0, 0.0, True
    for row, (slot, count) in enumerate(zip(plan.slots.tolist(), plan.num_scheduled.tolist(), strict=True)):
        computed = slots.get(slot)
        if computed is None:
            known = False
            continue
        slots[slot] = computed + count
        if row < num_decodes:
            context += computed + count
        else:
            pairs += count * (computed + (count + 1) / 2)
    return {
        "decodes": int(plan.num_scheduled[:num_decodes].sum()),
        "decode_context": context if known else None,
        "prefill_rows": len(plan.slots) - num_decodes,
        "prefill_tokens": int(plan.num_scheduled[num_decodes:].sum()),
        "prefill_pairs": pairs,
        "copies": len(plan.copy_sources),
        "swapped_out": len(plan.swap_out_blocks),
        "swapped_in": len(plan.swap_in_blocks),
    }


def _tables(plan: StepPlan) -> dict[str, Any]:
    """What one plan changes in the block tables, where it does: who owns which block follows from all of them. Slots
    are ``freed``; ``entered`` holds slot, sequence id, number of tokens computed before and block table of each new
    sequence, ``appended`` slot and block. Where blocks have pages for layers with windows, these stand behind."""
    entered, at, page = [], 0, 0
    counts = [new.first_block + new.num_blocks - new.first_windowed for new in plan.new_sequences]
    each = len(plan.new_windowed) // max(1, sum(counts))
    for new, count in zip(plan.new_sequences, counts, strict=True):
        blocks = plan.new_block_ids[at : at + new.num_blocks].tolist()
        blocks += plan.new_windowed[page : page + count * each].tolist()
        entered.append([new.slot, new.sequence_id, new.num_computed_tokens, blocks])
        at, page = at + new.num_blocks, page + count * each
    each = len(plan.appended_windowed) // max(1, len(plan.appended_slots))
    slots = np.concatenate((plan.appended_slots, np.repeat(plan.appended_slots, each)))
    appended = np.stack((slots, np.concatenate((plan.appended_blocks, plan.appended_windowed))), axis=1).tolist()
    changes = {"freed": plan.freed_slots.tolist(), "entered": entered, "appended": appended}
    return {name: each for name, each in changes.items() if each}


class Follower:
    """Reads the streams of all live actors, each from its end at the time when it was first seen."""

    def __init__(self, bus: Bus, names: Names) -> None:
        self._bus, self._names = bus, names
        self._positions: dict[str, EntryId] = {}
        self._looked_s = float("-inf")
        self.block_size = 16
        self.num_blocks = 0
        """Of the first executor."""
        self.lenders: dict[str, str] = {}
        """Executors by the addresses of their caches, those that are gone among them."""

    async def read(self, block_ms: int = READ_BLOCK_MS) -> list[Entry]:
        """What has come since the last call; waits a while for something."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            await self._look()
        entries = await self._bus.read(dict(self._positions), count=512, block_ms=block_ms)
        for entry in entries:
            self._positions[entry.stream] = entry.id
        return entries

    async def _look(self) -> None:
        names = self._names
        streams = [names.control, names.tokenized]  # a report before the plans that were written behind it
        for lease in await self._bus.leases():
            if lease.kind == "detokenizer":
                streams.append(names.sequences(lease.name))
            elif lease.kind == "executor":
                streams += [names.steps(lease.name), names.results(lease.name)]
                block_size = lease.info.get("block_size")
                self.block_size = block_size if isinstance(block_size, int) else self.block_size
                num_blocks = lease.info.get("num_blocks")
                self.num_blocks = self.num_blocks or (num_blocks if isinstance(num_blocks, int) else 0)
                self.lenders[str(lease.info.get("kv_address", ""))] = lease.name
        for stream in streams:
            if stream not in self._positions:
                self._positions[stream] = await self._bus.last_id(stream)


async def record(settings: Settings, path: Path, seconds: float | None) -> int:
    """Record until ``seconds`` have passed or the task is cancelled (Ctrl-C)."""
    bus = make_bus(settings)
    try:
        await bus.connect()
        follower = Follower(bus, Names(settings.name))
        await follower.read(0)
        with open_text(path, "w") as out:
            recording = Recording(
                out, Names(settings.name), time.time(), follower.block_size, follower.num_blocks, follower.lenders
            )
            with suppress(asyncio.CancelledError, TimeoutError):
                async with asyncio.timeout(seconds):
                    await _follow(follower, recording)
            cut = recording.finish()
    finally:
        await bus.close()
    told = f"{recording.num_requests} requests ({cut} not ended yet), {recording.num_steps} steps"
    print(f"{path}: {told}, {recording.pulls.num_pulls} pulls")
    return 0


async def _follow(follower: Follower, recording: Recording) -> None:
    while True:
        try:
            for entry in await follower.read():
                recording.take(entry)
        except BusUnavailable:
            await asyncio.sleep(LOOK_S)
