"""The state of one replica: its slots, its blocks, its plans in flight, and the room that they leave.

The operations over it are functions in other modules: :mod:`pagebus.actors.scheduler.replica.prefix_match` finds cached
tokens of a sequence, :mod:`pagebus.actors.scheduler.replica.token_budget` divides a step, and
:mod:`pagebus.actors.scheduler.replica.preemption` takes slots away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagebus.actors.model.window import Window
from pagebus.actors.scheduler.beam_search import Count, peak_blocks
from pagebus.actors.scheduler.events import ReplicaJoined
from pagebus.actors.scheduler.kv.adapters import Adapters
from pagebus.actors.scheduler.kv.block_pool import BlockPool
from pagebus.actors.scheduler.kv.prefix_index import PrefixIndex, page_keys
from pagebus.actors.scheduler.kv.prompt_rate import PromptRate
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.disk.disk_tier import DiskTier
from pagebus.actors.scheduler.replica.drafts.depth import Depth
from pagebus.actors.scheduler.replica.host_tier import HostTier
from pagebus.actors.scheduler.replica.moves.counts import MoveCounts
from pagebus.actors.scheduler.replica.moves.leaver import Leaver
from pagebus.actors.scheduler.replica.pipeline import Pipeline
from pagebus.actors.scheduler.replica.plan_builder import InFlight, PlanBuilder
from pagebus.actors.scheduler.replica.prefill_pacing import Pacer
from pagebus.actors.scheduler.replica.slots import Slots, SlotTable
from pagebus.actors.scheduler.replica.step_results import StepResults
from pagebus.actors.scheduler.replica.step_time import Work
from pagebus.actors.scheduler.request import BeamGroup, Request, Sequence

WATERMARK = 0.01
"""Share of the blocks that admission leaves free for running sequences to grow."""
LOAN_STEPS = 6
"""Steps from the plan that lends blocks until they are back, besides the copy: results, an order, and a report."""
LOAD_TOKENS_PER_SEQUENCE = 16
"""The weight of a running sequence in placement, in tokens of prefill."""


@dataclass(slots=True)
class Counts:
    """What has happened on one replica since it joined.

    ``num_swaps``, ``num_recomputes``, ``num_departures``: sequences preempted for want of blocks, by how they continue.
    ``num_parked``: sequences that left because their reader has gone. ``prefix_queries``, ``prefix_hits``: tokens
    looked up in the prefix index, and found. ``num_given_back``: pages that fell out of a window.
    """

    num_swaps: int = 0
    num_recomputes: int = 0
    num_departures: int = 0
    num_parked: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_given_back: int = 0

    @property
    def num_preemptions(self) -> int:
        """Sequences preempted for want of blocks."""
        return self.num_swaps + self.num_recomputes + self.num_departures

    def preempted(self, *, swaps: bool, goes: bool) -> None:
        """Count a sequence that gave its blocks up: it ``swaps`` them, ``goes`` elsewhere, or is computed again."""
        if swaps:
            self.num_swaps += 1
        elif goes:
            self.num_departures += 1
        else:
            self.num_recomputes += 1

    def parked(self) -> None:
        """Count a sequence whose reader has gone."""
        self.num_parked += 1

    def given_back(self, num_pages: int) -> None:
        """Count pages that fell out of a window."""
        self.num_given_back += num_pages

    def looked_up(self, num_tokens: int, num_found: int) -> None:
        """Count a look into the prefix index."""
        self.prefix_queries += num_tokens
        self.prefix_hits += num_found


class ReplicaBase:
    """The state of one replica.

    ``bound``: by slot, sequences that have a slot and no planned row yet. ``searches``: running beam groups by the
    sequence id of their leader. ``preempted``: preempted sequences that are still to be queued again.

    ``window`` applies to the ``blocks`` of sequences, ``windowed`` to their ``windowed`` pages. ``kept`` is the one of
    the two outside which pages are released.
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
        window: int = 0,
    ) -> None:
        self.name = joined.replica
        self.epoch = joined.epoch
        self.max_model_len = joined.max_model_len
        self.kv_kind, self.kv_address, self.kv_host = joined.kv_kind, joined.kv_address, joined.kv_host
        self.copy_bytes_per_s = joined.copy_bytes_per_s
        self.block_bytes = joined.block_bytes
        self.prompt_rate = PromptRate(joined.prefill_tokens_per_s)
        self.budget = min(joined.max_num_batched_tokens, most_tokens or joined.max_num_batched_tokens)
        self.block_size = joined.block_size
        self.stages = joined.stages
        self.pipeline = Pipeline(depth, joined.stages)
        self.caching = caching
        self.pacer = pacer
        self.suspended = False
        self.most_prompt_tokens: int | None = None
        self.window = Window(window, self.block_size)
        self.windowed_pages = joined.windowed_pages
        self.windowed = Window(joined.windowed_tokens, self.block_size)
        self.kept = self.windowed if self.windowed_pages else self.window
        self.index = PrefixIndex(self.window)
        self.pool = BlockPool(joined.num_blocks, self.index)
        # No more sequences than the budget has tokens: so all that decode fit in every step, and none starves.
        self.slots = SlotTable(min(joined.max_num_seqs, self.budget), self.block_size, joined.num_drafts)
        self.depth = Depth(self.slots.num_slots)
        """Chooses numbers of drafts; unused if the executor does not speculate."""
        self.adapters = Adapters(joined.max_loras, self.pool, self.index, most=joined.most_loras, ranks=joined.ranks)
        self.builder = PlanBuilder(self.epoch, self.adapters, predicts=joined.num_drafts > 0)
        self.step = first_step - 1
        self.in_flight: deque[InFlight] = deque()
        self.step_results = StepResults(self.name, self.slots, last_step=self.step)
        self.preempted: list[Sequence] = []
        self.bound: dict[int, Sequence] = {}
        self.searches: dict[int, BeamGroup] = {}
        self.host_tier = HostTier(joined, self.pool, self.index, self.builder, self.prompt_rate, preemption_mode)
        self.host_tier.pool.index.step = first_step
        self.disk_tier = DiskTier(joined, self.host_tier, self.index, self.builder, self.prompt_rate)
        self.goes_elsewhere: Callable[[str, Leaver], bool] | None = None
        self.counts, self.moves = Counts(), MoveCounts()

    @property
    def num_pages(self) -> int:
        """Pages of a block of tokens."""
        return 1 + self.windowed_pages

    @property
    def num_free(self) -> int:
        """Blocks of tokens for which there are free pages."""
        return self.pool.num_free // (1 + self.windowed_pages)

    def take_preempted(self) -> list[Sequence]:
        """The sequences that are to be queued again, once."""
        preempted, self.preempted = self.preempted, []
        return preempted

    def ask_before_leaving(self, goes_elsewhere: Callable[[str, Leaver], bool] | None) -> None:
        """Have this called, with the replica's name, before a sequence is preempted for want of blocks: it says whether
        the sequence continues elsewhere."""
        self.goes_elsewhere = goes_elsewhere

    def limit_prompts(self, num_tokens: int | None) -> None:
        """Compute at most this many prompt tokens per step, so that streams which were handed over do not wait."""
        self.most_prompt_tokens = num_tokens

    # -- room and load -------------------------------------------------------------------------------------------------
    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence, with all its beams, could run here alone up to its limit."""
        num_tokens = min(sequence.limit, self.max_model_len) - 1
        if len(sequence.tokens) > num_tokens or sequence.num_slots > self.slots.num_slots:
            return False
        request = sequence.request
        num_blocks = self.pool.num_blocks - self.adapters.num_blocks(request.digest)
        return self.most_blocks(request, num_tokens, sequence.least_tokens) <= num_blocks

    def most_blocks(self, request: Request, num_tokens: int, num_queries: int) -> int:
        """Pages that always suffice for ``num_tokens`` computed tokens of a request, or of each of its beams, of which
        a step computes ``num_queries`` at most."""
        every = blocks_needed(request, num_tokens, self.block_size)
        if not self.kept.num_tokens or request.sampling.beam_width:
            return every * self.num_pages
        held = min(every, self.kept.most_blocks(min(num_queries, num_tokens)))
        return every + held * self.windowed_pages if self.windowed_pages else held

    def blocks_to_admit(self, request: Request, num_tokens: int) -> int:
        """Pages that must be free for a sequence of ``num_tokens``: those of all its tokens, or with a window the most
        that it holds at a time."""
        return min(self.most_blocks(request, num_tokens, self.budget), self.pool.num_blocks)

    def is_open(self, priority_class: int = JOB) -> bool:
        """Whether the next plan has a slot and token budget for one more sequence of this priority class.

        For interactive sequences, slots and tokens of jobs count as free, so a replica open to jobs is open to all.
        Beside streams, a job is admitted only if the longer step still keeps the inter-token target.
        """
        if priority_class == JOB and not self._has_time_for_job():
            return False
        if self.suspended or not (self.slots.has_free_slot or (priority_class != JOB and self.slots.num_jobs)):
            return False
        return self.backlog(priority_class) < self.budget

    def _has_time_for_job(self) -> bool:
        table = self.slots
        if self.pacer is None or len(table) == table.num_jobs:
            return True
        return self.pacer.allows(Work(decodes=len(table) + 1, decode_context=int(table.computed.sum())))

    def backlog(self, priority_class: int = JOB) -> int:
        """Tokens of running sequences, up to this priority class, that can be computed and are in no plan."""
        return self.slots.backlog(priority_class)

    def ahead(self) -> int:
        """Tokens that the device computes before those of a sequence that enters now."""
        return self.backlog() + self.pipeline.num_tokens

    def growth(self, seconds: float) -> int:
        """Pages that running sequences take during a loan whose copy takes ``seconds`` (:data:`LOAN_STEPS`)."""
        step_s = self.pipeline.decode_s
        steps = LOAN_STEPS + (seconds / step_s if step_s else 0.0)
        return -(-int(steps * len(self.slots)) // self.block_size) * self.num_pages

    def load(self, priority_class: int = JOB) -> int:
        """The expected wait of a new sequence of this priority class, in tokens."""
        return self.backlog(priority_class) + LOAD_TOKENS_PER_SEQUENCE * len(self.slots)

    def room(self) -> int:
        """Pages that an arriving sequence may take: free ones, less those that running sequences still need and a
        reserve for growth.

        An empty replica offers all its pages. Without a free slot the result is 0.
        """
        if not self.slots.has_free_slot:
            return 0
        table, pool = self.slots, self.pool
        if not len(table):
            return pool.num_free
        room = pool.num_free - max(1, int(pool.num_blocks * WATERMARK))
        # Each sequence lacks blocks for what it is behind and for its next token at most.
        most = (table.backlog(JOB) // self.block_size + 2 * len(table) + 1) * self.num_pages
        if room - most > self.max_model_len // self.block_size * self.num_pages:
            return room - most  # more than a sequence needs, so it need not be exact
        missing = table.num_missing_blocks(self.kept.most_blocks(self.budget) if self.kept.num_tokens else None)
        if self.windowed_pages:
            missing = table.num_missing_blocks() + missing * self.windowed_pages
        return room - missing

    @property
    def has_spare(self) -> bool:
        """Whether all blocks that the next plan may take are free, and those of one more sequence."""
        most = (self.budget + self.max_model_len) // self.block_size + 2 * len(self.slots) + 2
        return self.pool.num_free >= most * self.num_pages

    @property
    def tries_suspect(self) -> bool:
        """Whether a suspect sequence runs here that has not yet progressed beyond its last loss."""
        known = self.slots.known
        return any(each.suspect and known[each.slot] <= each.num_tokens_at_loss for each in self.slots.occupied())

    # -- blocks --------------------------------------------------------------------------------------------------------
    def drop_source(self, sequence: Sequence) -> None:
        """Release the source of a sequence's pending copy: the copy is planned, or no longer wanted."""
        if sequence.copied is not None:
            self.pool.release(sequence.copied[0])
            sequence.copy_planned()

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """Take the pages of ``count`` blocks of tokens, as of ``blocks`` and ``windowed`` of a sequence.

        Raises:
            ValueError: fewer are free; nothing was taken.
        """
        if not self.windowed_pages:
            return self.pool.allocate(count), []
        pages = self.pool.allocate(count * self.num_pages)
        return pages[:count], pages[count:]

    def list_blocks(self, slots: Slots) -> None:
        """Add blocks to the prefix index that have become full of planned tokens with known values."""
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
            self.index.insert_all(sequence.hashes, sequence.blocks, start, end, sequence.first_block)
            if each := self.windowed_pages:
                self.index.insert_pages(sequence.hashes, sequence.windowed, start, end, sequence.first_windowed, each)
            if self.disk_tier.is_on:
                self.offer_to_disk(sequence, start, min(end, len(sequence.request.prompt) // size))

    def offer_to_disk(self, sequence: Sequence, start: int, end: int) -> None:
        """The blocks ``start`` to ``end`` of a sequence, listed now, are worth a write."""
        first, each = max(start, sequence.first_block), self.windowed_pages
        self.disk_tier.offer(sequence.hashes[first:end], sequence.blocks[first - sequence.first_block :])
        if each:
            first = max(start, sequence.first_windowed)
            keys = [key for block_hash in sequence.hashes[first:end] for key in page_keys(block_hash, each)]
            self.disk_tier.offer(keys, sequence.windowed[(first - sequence.first_windowed) * each :])


def blocks_needed(request: Request, num_tokens: Count, block_size: int) -> Count:
    """Blocks that always suffice for ``num_tokens`` computed tokens of a request, or of each of its beams."""
    return peak_blocks(len(request.prompt), num_tokens, max(1, request.sampling.beam_width), block_size)
