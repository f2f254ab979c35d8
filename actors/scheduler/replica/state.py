"""The fields of one replica: its slots, its blocks, the plans that it has been given, and how much room that leaves.

What plans over them is elsewhere: :mod:`pagebus.actors.scheduler.replica.prefix_match` looks for what is there of a
sequence, :mod:`pagebus.actors.scheduler.replica.token_budget` shares a step out,
:mod:`pagebus.actors.scheduler.replica.preemption` takes slots away.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.scheduler.kv.block_pool import BlockPool
from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.host_tier import HostTier
from pagebus.actors.scheduler.replica.pipeline import Pipeline
from pagebus.actors.scheduler.replica.plan_builder import InFlight, PlanBuilder
from pagebus.actors.scheduler.replica.prefill_pacing import Pacer
from pagebus.actors.scheduler.replica.slots import Slots, SlotTable
from pagebus.actors.scheduler.replica.step_results import StepResults
from pagebus.actors.scheduler.replica.step_time import Work
from pagebus.actors.scheduler.request import BeamGroup, Sequence, blocks_needed

WATERMARK = 0.01
"""Share of the blocks that admission leaves free, so that running sequences can grow for a while."""
LOAD_TOKENS_PER_SEQUENCE = 16
"""What a running sequence weighs in placement, in tokens of prefill."""


class ReplicaState:
    """The fields of one replica.

    ``bound``: sequences that have a slot and no row yet, by slot. ``searches``: the beam groups that run here, by their
    leaders' sequence ids. ``preempted``: sequences that gave way, to be queued again. Counts: ``num_swaps`` and
    ``num_recomputes`` (preemptions of both kinds), ``num_parked``, ``prefix_queries`` and ``prefix_hits`` (tokens).
    """

    def __init__(
        self,
        joined: ReplicaJoined,
        *,
        depth: int,
        caching: bool,
        first_step: int,
        pacer: Pacer | None = None,
        preemption_mode: str = "auto",
        most_tokens: int | None = None,
    ) -> None:
        self.name = joined.replica
        self.epoch = joined.epoch
        self.max_model_len = joined.max_model_len
        self.budget = min(joined.max_num_batched_tokens, most_tokens or joined.max_num_batched_tokens)
        self.block_size = joined.block_size
        self.pipeline = Pipeline(depth)
        self.caching = caching
        self.pacer = pacer
        self.suspended = False
        self.index = PrefixIndex()
        self.pool = BlockPool(joined.num_blocks, self.index)
        # No more sequences than the budget has tokens: so all that decode fit in every step, and none starves.
        self.slots = SlotTable(min(joined.max_num_seqs, self.budget), self.block_size)
        self.builder = PlanBuilder(self.epoch)
        self.step = first_step - 1
        self.in_flight: deque[InFlight] = deque()
        self.step_results = StepResults(self.name, self.slots, last_step=self.step)
        self.preempted: list[Sequence] = []
        self.bound: dict[int, Sequence] = {}
        self.searches: dict[int, BeamGroup] = {}
        self.host_tier = HostTier(joined, self.pool, self.index, self.builder, preemption_mode)
        self.num_swaps = self.num_recomputes = self.num_parked = self.prefix_queries = self.prefix_hits = 0

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks up."""
        return self.num_swaps + self.num_recomputes

    # -- room and load -------------------------------------------------------------------------------------------------
    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence, with all its beams but alone, could run here to its limit."""
        num_tokens = min(sequence.limit, self.max_model_len) - 1
        if len(sequence.tokens) > num_tokens or sequence.num_slots > self.slots.num_slots:
            return False
        return blocks_needed(sequence.request, num_tokens, self.block_size) <= self.pool.num_blocks

    def is_open(self, level: int = JOB) -> bool:
        """Whether the next plan has a slot and tokens of budget for one more sequence of this level. For interactive
        ones, slots and tokens of jobs count as free. (So what is open to jobs is open to all.) Beside streams, one more
        job must not make steps longer than the pace allows."""
        if level == JOB and not self._has_time_for_job():
            return False
        if self.suspended or not (self.slots.has_free_slot or (level != JOB and self.slots.num_jobs)):
            return False
        return self.backlog(level) < self.budget

    def _has_time_for_job(self) -> bool:
        table = self.slots
        if self.pacer is None or len(table) == table.num_jobs:
            return True
        return self.pacer.allows(Work(decodes=len(table) + 1, decode_context=int(table.computed.sum())))

    def backlog(self, level: int = JOB) -> int:
        """Tokens that running sequences, up to this level, could compute and no plan has."""
        return self.slots.backlog(level)

    def load(self, level: int = JOB) -> int:
        """How long a new sequence of this level would wait here, in tokens."""
        return self.backlog(level) + LOAD_TOKENS_PER_SEQUENCE * len(self.slots)

    def room(self) -> int:
        """Blocks that a sequence may take to come in: free ones, besides what running sequences need for their tokens
        and a reserve for them to grow. An empty replica gives all; without a free slot there are none."""
        if not self.slots.has_free_slot:
            return 0
        table, pool = self.slots, self.pool
        if not len(table):
            return pool.num_free
        room = pool.num_free - max(1, int(pool.num_blocks * WATERMARK))
        # Each sequence lacks blocks for what it is behind and for its next token at most.
        most = table.backlog(JOB) // self.block_size + 2 * len(table) + 1
        if room - most > self.max_model_len // self.block_size:
            return room - most  # more than a sequence needs, so it need not be exact
        return room - table.num_missing_blocks()

    @property
    def tries_suspect(self) -> bool:
        """Whether a sequence runs here that may be what ends executors, and has not shown yet that it is not."""
        known = self.slots.known
        return any(each.suspect and known[each.slot] <= each.num_tokens_at_loss for each in self.slots.occupied())

    # -- blocks --------------------------------------------------------------------------------------------------------
    def drop_source(self, sequence: Sequence) -> None:
        """The copy is in the plan, or not wanted any more: the source may change."""
        if sequence.copied is not None:
            self.pool.release(sequence.copied[:1])
            sequence.copied = None

    def list_blocks(self, slots: Slots) -> None:
        """List the blocks that have become full of planned tokens whose values are known."""
        table, size = self.slots, self.block_size
        full, listed = np.minimum(table.computed[slots], table.known[slots]) // size, table.indexed[slots]
        rows = (full > listed).nonzero()[0]
        if not len(rows):
            return
        slots, full = slots[rows], full[rows]
        table.indexed[slots] = full
        for slot, start, end in zip(slots.tolist(), listed[rows].tolist(), full.tolist(), strict=True):
            sequence = table.at(slot)
            sequence.extend_hashes(size)
            self.index.insert_all(sequence.hashes, sequence.blocks, start, end)
