"""Rows of a snapshot's tables: one replica, request or sequence each, and the columns that they are sent in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import Request, Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import (
    OUTCOME_ABORTED,
    OUTCOME_DONE,
    OUTCOME_NONE,
    SEQUENCE_IN_FLIGHT,
    SEQUENCE_RUNNING,
    SEQUENCE_WAITING,
    Int32Array,
    ReplicaState,
)

STATES = {
    State.WAITING: SEQUENCE_WAITING,
    State.SWAPPED: SEQUENCE_WAITING,
    State.PREEMPTED_IN_FLIGHT: SEQUENCE_IN_FLIGHT,
    State.BOUND: SEQUENCE_RUNNING,
    State.ENTERED: SEQUENCE_RUNNING,
    State.ENDED: SEQUENCE_WAITING,
}


def replica_state(replica: Replica, role: str, num_cached: int, num_cached_hosts: int, num_pinned: int) -> ReplicaState:
    """The row of a replica. The three numbers are those of its entries in the snapshot's columns of blocks."""
    pool, tier = replica.pool, replica.host_tier
    return ReplicaState(
        name=replica.name,
        epoch=replica.epoch,
        step=replica.step,
        num_in_flight=len(replica.in_flight),
        num_slots=replica.slots.num_slots,
        num_running=len(replica.slots),
        token_budget=replica.budget,
        block_size=replica.block_size,
        num_blocks=pool.num_blocks,
        num_free=pool.num_free,
        num_cached=num_cached,
        num_pinned=num_pinned,
        num_host_blocks=tier.pool.num_blocks,
        num_host_free=tier.pool.num_free,
        num_cached_hosts=num_cached_hosts,
        num_swaps=replica.counts.num_swaps,
        num_recomputes=replica.counts.num_recomputes,
        prefix_queries=replica.counts.prefix_queries,
        prefix_hits=replica.counts.prefix_hits,
        swapped_out_blocks=tier.num_out,
        swapped_in_blocks=tier.num_in,
        suspended=replica.suspended,
        num_parked=replica.counts.num_parked,
        given_back_blocks=replica.counts.num_given_back,
        most_drafts=replica.slots.num_drafts,
        num_drafted=replica.step_results.acceptance.num_draft_tokens,
        num_accepted=replica.step_results.acceptance.num_accepted,
        most_adapters=replica.adapters.capacity,
        adapters=tuple(name for name, _ in replica.adapters.resident),
        num_disk_blocks=replica.disk_tier.pool.num_blocks,
        num_disk_used=len(replica.disk_tier.pool.stored),
        pulled_blocks=replica.moves.num_pulled,
        lent_blocks=replica.moves.num_lent,
        role=role,
        num_departures=replica.counts.num_departures,
        num_adapter_blocks=sum(len(blocks) for _, blocks in replica.adapters.resident),
    )


def request_row(replicas: Mapping[str, Replica], request: Request) -> tuple[int, ...]:
    """The row of a request, as of ``REQUEST_COLUMNS``."""
    sampling = request.sampling
    num_tokens = sum(_num_tokens(replicas, each) for each in request.sequences)
    num_output = num_tokens - len(request.prompt) * len(request.sequences) or request.num_output
    outcome = OUTCOME_NONE if request.num_live else OUTCOME_DONE
    if request.aborted or not request.started_s:
        outcome = OUTCOME_ABORTED
    return (
        int(request.priority_class == JOB),
        request.priority,
        len(request.prompt),
        request.num_cached or 0,
        -1 if sampling.max_tokens is None else sampling.max_tokens,
        sampling.n,
        request.num_live,
        request.num_preemptions,
        num_output,
        request.num_drafted + sum(_in_slot(replicas, each, "verified") for each in request.sequences),
        request.num_accepted + sum(_in_slot(replicas, each, "accepted") for each in request.sequences),
        outcome,
    )


def _in_slot(replicas: Mapping[str, Replica], sequence: Sequence, column: str) -> int:
    """A number of the sequence's slot, 0 where it has none."""
    if not sequence.in_slot or sequence.replica is None:
        return 0
    return int(getattr(replicas[sequence.replica].slots, column)[sequence.slot])


def _num_tokens(replicas: Mapping[str, Replica], sequence: Sequence) -> int:
    """Prompt and known output."""
    return _in_slot(replicas, sequence, "known") or len(sequence.tokens)


def sequence_row(
    replicas: Mapping[str, Replica], sequence: Sequence, request: int, numbers: dict[str, int], num_hosts: int
) -> tuple[int, ...]:
    """The row of a sequence, as of ``SEQUENCE_COLUMNS``; ``request`` and ``numbers`` say where its request and
    the replicas stand in the snapshot."""
    name = sequence.swapped.replica if sequence.replica is None and sequence.swapped else sequence.replica
    computed = 0
    if sequence.replica is not None and sequence.in_slot:
        computed = int(replicas[sequence.replica].slots.computed[sequence.slot])
    return (
        sequence.id,
        request,
        sequence.choice_index,
        STATES[sequence.state],
        -1 if name is None else numbers.get(name, -1),
        sequence.slot,
        _num_tokens(replicas, sequence),
        computed,
        len(sequence.pages),
        num_hosts,
        sequence.num_cached,
    )


def request_marks(request: Request, over_s: float) -> tuple[float, ...]:
    """What has happened to a request and when, as of ``REQUEST_MARKS``; 0: it has not."""
    ended_s = 0.0 if request.num_live else request.ended_s
    return (
        request.arrived_s,
        request.taken_s,
        request.tokenized_s,
        request.started_s,
        request.first_token_s,
        ended_s,
        over_s,
    )


def ages(marks: list[tuple[float, ...]], now_s: float) -> Int32Array:
    """Times as seconds before ``now_s``: float32 bits, NaN where there is no time."""
    times = np.array(marks, np.float64).reshape(-1)
    return np.where(times > 0, now_s - times, np.nan).astype("<f4").view(np.int32)


def step_marks(marks: list[tuple[float, ...]], now_s: float) -> Int32Array:
    """Marks of steps, as of ``STEP_MARKS``, in the same form; the last of each step is a time span already."""
    times = np.array(marks, np.float64).reshape(-1, 6)
    times[:, :5] = now_s - times[:, :5]
    return times.reshape(-1).astype("<f4").view(np.int32)


def ints(values: Iterable[int]) -> Int32Array:
    """The values as an array."""
    return np.array(list(values), np.int32)


def joined(parts: list[Int32Array]) -> Int32Array:
    """The parts as one array."""
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
