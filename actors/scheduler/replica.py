"""One replica: its slots, its blocks, and the plans it has been given whose results have not come.

Plans are executed strictly in order, and a plan's frees come before its rows. So a slot or block given up while older
steps that use it are in flight can be used again by the very next plan, and a block of prompt tokens can be shared from
the next plan on. What may *not* be used early is knowledge: sampled tokens count as known only once the result of their
step has come.
"""

from __future__ import annotations

from collections import deque
from itertools import chain

import numpy as np

from actors.scheduler.allotment import allot_blocks, share_budget
from actors.scheduler.block_pool import BlockPool
from actors.scheduler.events import ReplicaJoined
from actors.scheduler.landing import Landing
from actors.scheduler.lanes import Candidates, Lanes, blocks_needed, candidates
from actors.scheduler.offers import Offer
from actors.scheduler.order import JOB
from actors.scheduler.pacing import Pacer
from actors.scheduler.pipeline import Pipeline
from actors.scheduler.plan import InFlight, PlanBuilder
from actors.scheduler.prefix_index import PrefixIndex
from actors.scheduler.running import Running, Slots
from actors.scheduler.sequence import Sequence, State
from actors.scheduler.step_time import Work
from actors.scheduler.tiers import HostTier
from bus.messages import END_LENGTH, Int32Array, StepPlan, StepResult

WATERMARK = 0.01
"""Share of the blocks that admission leaves free, so that running sequences can grow for a while."""
LOAD_TOKENS_PER_SEQUENCE = 16
"""What a running sequence weighs in placement, in tokens of prefill."""


class Replica:
    """The state of one replica. Counts: ``num_swaps`` and ``num_recomputes`` (preemptions of both kinds),
    ``prefix_queries`` and ``prefix_hits`` (tokens)."""

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
        self.running = Running(min(joined.max_num_seqs, self.budget), self.block_size)
        self.builder = PlanBuilder(self.epoch)
        self.step = first_step - 1
        self.in_flight: deque[InFlight] = deque()
        self.landing = Landing(self.running, landed=self.step)
        self.preempted: list[Sequence] = []
        self._bound: dict[int, Sequence] = {}
        self._searches: dict[int, Lanes] = {}
        """Of the beams that run here, by the leader's sequence id."""
        self.tier = HostTier(joined, self.pool, self.index, self.builder, preemption_mode)
        self.num_swaps = self.num_recomputes = self.num_parked = self.prefix_queries = self.prefix_hits = 0

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks up."""
        return self.num_swaps + self.num_recomputes

    # -- admission ----------------------------------------------------------------------------------------------------
    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence, with all its beams but alone, could run here to its limit."""
        num_tokens = min(sequence.limit, self.max_model_len) - 1
        if len(sequence.tokens) > num_tokens or sequence.num_slots > self.running.num_slots:
            return False
        return blocks_needed(sequence.request, num_tokens, self.block_size) <= self.pool.num_blocks

    def is_open(self, level: int = JOB) -> bool:
        """Whether the next plan has a slot and tokens of budget for one more sequence of this level. For interactive
        ones, slots and tokens of jobs count as free. (So what is open to jobs is open to all.) Beside streams, one more
        job must not make steps longer than the pace allows."""
        if level == JOB and not self._has_time_for_job():
            return False
        if self.suspended or not (self.running.has_free_slot or (level != JOB and self.running.num_jobs)):
            return False
        return self.backlog(level) < self.budget

    def _has_time_for_job(self) -> bool:
        run = self.running
        if self.pacer is None or len(run) == run.num_jobs:
            return True
        return self.pacer.allows(Work(decodes=len(run) + 1, decode_context=int(run.computed.sum())))

    def backlog(self, level: int = JOB) -> int:
        """Tokens that running sequences, up to this level, could compute and no plan has."""
        return self.running.backlog(level)

    def load(self, level: int = JOB) -> int:
        """How long a new sequence of this level would wait here, in tokens."""
        return self.backlog(level) + LOAD_TOKENS_PER_SEQUENCE * len(self.running)

    def room(self) -> int:
        """Blocks that a sequence may take to come in: free ones, besides what running sequences need for their tokens
        and a reserve for them to grow. An empty replica gives all; without a free slot there are none."""
        if not self.running.has_free_slot:
            return 0
        run, pool = self.running, self.pool
        if not len(run):
            return pool.num_free
        room = pool.num_free - max(1, int(pool.num_blocks * WATERMARK))
        # Each sequence lacks blocks for what it is behind and for its next token at most.
        most = run.backlog(JOB) // self.block_size + 2 * len(run) + 1
        if room - most > self.max_model_len // self.block_size:
            return room - most  # more than a sequence needs, so it need not be exact
        return room - run.num_missing_blocks()

    def bind(self, sequence: Sequence, offer: Offer) -> None:
        """Give the sequence a slot and what is there of it; the first plan that schedules it tells the executor. What
        lies on the host is loaded with the next plan."""
        if sequence.swapped is not None and sequence.swapped.replica is not self:
            sequence.swapped.replica.tier.forget(sequence)
        self.pool.retain(offer.cached_blocks)
        self.tier.pool.retain(offer.host_blocks)
        sequence.blocks = offer.cached_blocks + self.pool.allocate(len(offer.host_blocks))
        if offer.fork is not None and offer.fork.copied is not None:
            self.pool.retain([offer.fork.copied])
            sequence.blocks += self.pool.allocate(1)
            sequence.copied = offer.fork.copied, sequence.blocks[-1]
        sequence.num_cached = offer.num_tokens
        sequence.limit = min(sequence.limit, self.max_model_len)
        sequence.replica = self
        self.running.enter(sequence, sequence.num_cached)
        self._bound[sequence.slot] = sequence
        if sequence.lanes is not None:
            self._bound.update({lane.slot: lane for lane in sequence.lanes.settle(self)})
            self._searches[sequence.id] = sequence.lanes
        if offer.host_blocks:
            self.tier.load(sequence, len(offer.cached_blocks), offer.host_blocks)
        if self.caching and not sequence.looked_up and sequence.leader is None:
            sequence.looked_up = True
            found = len(offer.cached_blocks) * self.block_size
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += found
            self.tier.count_lookup(len(sequence.tokens) - found, sequence.num_cached - found)

    # -- planning -----------------------------------------------------------------------------------------------------
    def plan(self, now_s: float) -> tuple[StepPlan, list[Sequence]] | None:
        """The next step and the sequences that enter the batch with it; None if there is nothing to do or the pipeline
        is full. Sequences that had to give way are added to ``preempted``."""
        if self.suspended or not self.pipeline.has_room:
            return None
        if not len(self.running) and not self.builder.freed_slots:
            return None  # the usual case of an idle replica, without arrays
        for lanes in self._searches.values():
            if not lanes.is_complete:
                lanes.follow(self)
        behind = self.tier.hold_back(self.running.behind())
        slots: Slots = behind.nonzero()[0]
        counts = behind[slots]
        num_decodes = len(slots)
        if num_decodes and int(counts.max()) > 1:
            slots, counts, num_decodes = share_budget(self, now_s, slots, counts)
        if len(slots):
            slots, counts, num_decodes = allot_blocks(self, slots, counts, num_decodes)
        if not len(slots) and (self.in_flight or not self.builder.freed_slots):
            return None
        self.tier.finish_plan(self.step + 1)
        entering = self._enter(slots) if self._bound else []
        for lane in self.builder.rewritten:
            self._drop_source(lane)
        self._send_off(slots, counts, num_decodes)
        return self.builder.build(self.step, now_s, num_decodes, slots, counts), entering

    def preempt(self, sequence: Sequence, *, parked: bool = False) -> None:
        """Take slot and blocks away, for want of blocks or because its listener left (``parked``, counted apart).

        The tokens are kept, and computed again later unless the host tier keeps their blocks. (One that only waits for
        its last token will need no blocks any more.) Of beams, the leader's are kept: the others go on from what they
        share with it.
        """
        slot, run = sequence.slot, self.running
        num_computed = int(run.computed[slot])
        if sequence.lanes is not None:  # the last token's step is done again, for its candidates
            num_computed = min(num_computed, int(run.known[slot]) - 1)
            if sequence.copied is not None:
                num_computed -= num_computed % self.block_size  # the rest is not copied yet
        if sequence.entered:
            returns = 0 < num_computed < run.last[slot]
            swaps = returns and self.tier.swap_out(self, sequence, num_computed, int(run.indexed[slot]))
            self.num_parked += parked
            self.num_swaps += bool(swaps) and not parked
            self.num_recomputes += not swaps and not parked
        self.remove(sequence)
        self.landing.add(sequence, self)
        self.preempted.append(sequence)

    def _enter(self, slots: Slots) -> list[Sequence]:
        """Sequences whose first rows these are."""
        entering = [self._bound.pop(slot) for slot in slots.tolist() if slot in self._bound]
        for sequence in entering:
            self.tier.entered(sequence)
            self.builder.enter(sequence)
            self._drop_source(sequence)
        return entering

    def _drop_source(self, sequence: Sequence) -> None:
        """The copy is in the plan, or not wanted any more: the source may change."""
        if sequence.copied is not None:
            self.pool.release(sequence.copied[:1])
            sequence.copied = None

    def _send_off(self, slots: Slots, counts: Int32Array, num_decodes: int) -> None:
        """Count the rows as computed and remember them until their result comes."""
        self.step += 1
        if self.pacer is not None:
            self.pacer.planned(self.running.computed[slots], counts, num_decodes)
        ids = self.running.ids[slots]
        samples = self.running.advance(slots, counts, self.step)
        sample_slots, sample_ids = slots, ids
        if np.count_nonzero(samples) < len(slots):
            sample_slots, sample_ids = slots[samples], ids[samples]
        self.in_flight.append(InFlight(self.step, slots, ids, sample_slots, sample_ids))
        self.pipeline.planned(len(slots), num_decodes)
        if self.caching and num_decodes < len(slots):
            self._list_blocks(slots[num_decodes:])

    # -- results ------------------------------------------------------------------------------------------------------
    def take_result(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Tokens and blocks of one step are known now; returns the sequences that ended, each with ``ends``.

        Raises:
            ProtocolError: the result contradicts the plans; nothing has changed.
        """
        if result.step <= self.landing.landed:
            return []  # a repeat
        arrival = self.landing.match(self.in_flight[0] if self.in_flight else None, result)
        found = candidates(self, arrival, result) if self._searches else []
        self.tier.copied_step = max(self.tier.copied_step, min(result.copied_step, result.step))
        self.pipeline.done(result.launched_s, result.done_s)
        if self.pacer is not None:
            self.pacer.done(result.launched_s, result.done_s)
        self.landing.confirm(self.in_flight.popleft(), self._list_blocks if self.caching else None)
        return self.landing.take(arrival, result) + self._advance_beams(found)

    def _advance_beams(self, found: list[Candidates]) -> list[tuple[Sequence, int]]:
        """Make the choices whose last candidates these are; returns the leaders whose searches are over."""
        over = []
        for each in found:
            lanes = each.lane.lanes
            assert lanes is not None
            if lanes.give(each.lane.choice_index, each.top_ids, each.top_bits) and lanes.advance(self):
                over.append((lanes.leader, END_LENGTH))
        return over

    def _list_blocks(self, slots: Slots) -> None:
        """List the blocks that have become full of planned tokens whose values are known."""
        run, size = self.running, self.block_size
        full, listed = np.minimum(run.computed[slots], run.known[slots]) // size, run.indexed[slots]
        rows = (full > listed).nonzero()[0]
        if not len(rows):
            return
        slots, full = slots[rows], full[rows]
        run.indexed[slots] = full
        for slot, start, end in zip(slots.tolist(), listed[rows].tolist(), full.tolist(), strict=True):
            sequence = run.at(slot)
            sequence.extend_hashes(size)
            self.index.insert_all(sequence.hashes, sequence.blocks, start, end)

    # -- leaving ------------------------------------------------------------------------------------------------------
    @property
    def tries_suspect(self) -> bool:
        """Whether a sequence runs here that may be what ends executors, and has not shown yet that it is not."""
        known = self.running.known
        return any(each.suspect and known[each.slot] <= each.num_tokens_at_loss for each in self.running.occupied())

    def remove(self, sequence: Sequence) -> None:
        """The sequence gives up slot and blocks, its beams too. Its state is the caller's to set."""
        if sequence.lanes is not None:
            last_steps = [int(self.running.planned[lane.slot]) for lane in sequence.lanes.members]
            for lane in sequence.lanes.members:
                self._vacate(lane)
            sequence.last_step = max(last_steps)
            sequence.lanes.disband()
            del self._searches[sequence.id]
        else:
            self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.entered:
            self.builder.freed_slots.append(sequence.slot)
            self.builder.forget(sequence)
        else:
            del self._bound[sequence.slot]
            self.tier.cancel(sequence.slot)
        self._drop_source(sequence)
        self.running.leave(sequence)
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.entered = False
        sequence.replica = None

    def suspend(self) -> None:
        """Plan nothing more here. What was swapped out may run elsewhere at once."""
        self.suspended = True
        self.tier.forget_all()

    def take_back(self) -> list[Sequence]:
        """Sequences that have a slot but were never started: they give it up."""
        sequences = [sequence for sequence in self._bound.values() if not sequence.started]  # no lane but the leader
        for sequence in sequences:
            self.remove(sequence)
            sequence.state = State.WAITING
        return sequences

    def give_up(self) -> list[Sequence]:
        """The replica is gone: all its sequences, with the tokens that are known, ready to run elsewhere. Those that
        were landing are not among them (they are queued already)."""
        sequences = [sequence for sequence in self.running.occupied() if sequence is sequence.head]
        for sequence in sequences:
            self.remove(sequence)
            sequence.state = State.WAITING
        self.tier.forget_all()
        self.landing.land_all()
        self.in_flight.clear()
        self.suspended = True
        return sequences

    def check_integrity(self) -> None:
        """Slots, blocks, index and pipeline agree.

        Raises:
            AssertionError: they do not.
        """
        self.running.check_integrity()
        sequences = self.running.occupied()
        sources = [sequence.copied[0] for sequence in sequences if sequence.copied is not None]
        self.pool.check_integrity(chain(sources, *(sequence.blocks for sequence in sequences)))
        assert all(sequence.replica is self for sequence in sequences)
        assert {sequence.slot for sequence in sequences if not sequence.entered} == set(self._bound)
        self.tier.check_integrity(self, sequences)
        assert len(self.in_flight) == len(self.pipeline) <= self.pipeline.most
        assert [flight.step for flight in self.in_flight] == [*range(self.landing.landed + 1, self.step + 1)]
        self.landing.check_integrity()
        assert sum(lanes.width for lanes in self._searches.values()) == self.running.num_beams
        for lanes in self._searches.values():
            lanes.check_integrity(self)
        for sequence in sequences:
            listed = int(self.running.indexed[sequence.slot])
            assert len(sequence.hashes) >= listed or not self.caching
