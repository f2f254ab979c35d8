"""One replica: its slots, its blocks, and the plans it has been given whose results have not come.

Plans are executed strictly in order, and a plan's frees come before its rows. So a slot or block given up while older
steps that use it are in flight can be used again by the very next plan. What may *not* be reused early is knowledge:
tokens count as known, and blocks as holding them, only once the result of their step has come.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain

import numpy as np

from actors.scheduler.block_pool import BlockPool
from actors.scheduler.events import ReplicaJoined
from actors.scheduler.forking import Fork, fork_of
from actors.scheduler.landing import Landing
from actors.scheduler.order import JOB
from actors.scheduler.pacing import Pacer, prefill_of
from actors.scheduler.plan import InFlight, PlanBuilder, decodes_first
from actors.scheduler.prefix_index import PrefixIndex
from actors.scheduler.running import Running, Slots
from actors.scheduler.sequence import Sequence, State, Swapped
from actors.scheduler.step_time import Work
from actors.scheduler.tiers import HostTier
from bus.messages import Int32Array, StepPlan, StepResult

WATERMARK = 0.01
"""Share of the blocks that admission leaves free, so that running sequences can grow for a while."""
LOAD_TOKENS_PER_SEQUENCE = 16
"""What a running sequence weighs in placement, in tokens of prefill."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a replica that has room for a sequence has of it already: ``num_tokens`` tokens, in ``cached_blocks``, and
    after these in ``host_blocks``. ``saved_tokens``: the same less the time to load them. Valid until a pool changes.
    """

    cached_blocks: list[int]
    host_blocks: list[int]
    num_tokens: int
    saved_tokens: int
    fork: Fork | None = None


class Replica:
    """The state of one replica. Counts: ``num_preemptions``, ``prefix_queries`` and ``prefix_hits`` (tokens)."""

    def __init__(
        self,
        joined: ReplicaJoined,
        *,
        depth: int,
        caching: bool,
        first_step: int,
        pacer: Pacer | None = None,
        preemption_mode: str = "auto",
    ) -> None:
        self.name = joined.replica
        self.epoch = joined.epoch
        self.max_model_len = joined.max_model_len
        self.budget = joined.max_num_batched_tokens
        self.block_size = joined.block_size
        self.depth = depth
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
        self.tier = HostTier(joined, self.pool, self.index, self.builder, preemption_mode)
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0

    # -- admission ----------------------------------------------------------------------------------------------------
    def can_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence, alone, could run here to its limit."""
        num_tokens = min(sequence.limit, self.max_model_len) - 1
        return len(sequence.tokens) <= num_tokens <= self.pool.num_blocks * self.block_size

    def is_open(self, level: int = JOB) -> bool:
        """Whether the next plan has a slot and tokens of budget for one more sequence of this level. For interactive
        ones, slots and tokens of jobs count as free. (So what is open to jobs is open to all.)"""
        if self.suspended or not (self.running.has_free_slot or (level != JOB and self.running.job.any())):
            return False
        return self.backlog(level) < self.budget

    def backlog(self, level: int = JOB) -> int:
        """Tokens that running sequences, up to this level, could compute and no plan has."""
        return self.running.backlog(level)

    def load(self, level: int = JOB) -> int:
        """How long a new sequence of this level would wait here, in tokens."""
        return self.backlog(level) + LOAD_TOKENS_PER_SEQUENCE * len(self.running)

    def offer(self, sequence: Sequence) -> Offer | None:
        """The sequence's cached prefix if there are blocks for all of its tokens, besides what running sequences need
        for theirs and a reserve to grow, and a slot; None otherwise. An empty replica always has them."""
        if not self.running.has_free_slot:
            return None
        num_tokens, size = len(sequence.tokens), self.block_size
        fork = fork_of(sequence, self.running)
        cached, hosts = self._find(sequence) if fork is None else (fork.blocks, [])
        spare = self.pool.num_free - self.pool.num_unheld(cached)
        needed = -(-num_tokens // size) - len(cached)
        if len(self.running):
            spare -= max(1, int(self.pool.num_blocks * WATERMARK))
            # Each sequence lacks blocks for what it is behind and for its next token at most.
            most = self.running.backlog(JOB) // size + 2 * len(self.running) + 1
            spare -= self._outstanding_blocks() if needed + most > spare else most
        if needed > spare:
            return None
        if fork is not None:
            return Offer(cached, [], num_tokens - 1, num_tokens - 1, fork)
        swapped = self._swapped(sequence)
        found = swapped.num_tokens if swapped is not None else (len(cached) + len(hosts)) * size
        return Offer(cached, hosts, found, found - self.tier.cost_tokens(len(hosts)))

    def _swapped(self, sequence: Sequence) -> Swapped | None:
        """The sequence's host blocks, if they are here."""
        swapped = sequence.swapped
        return swapped if swapped is not None and swapped.replica is self else None

    def _find(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Device blocks that hold the sequence's first tokens, and host blocks that hold those after them."""
        swapped, size = self._swapped(sequence), self.block_size
        # At least one token must be computed, or there would be nothing to sample from.
        limit = (len(sequence.tokens) - 1 if swapped is None else swapped.num_tokens) // size
        cached: list[int] = []
        looks = self.caching and (swapped is not None or not sequence.scores_prompt)
        if looks:
            sequence.extend_hashes(size)
            cached = self.index.match(sequence.hashes, limit)
        if swapped is not None:
            return cached, swapped.host_blocks[len(cached) :]
        return cached, self.tier.match(sequence.hashes, len(cached), limit) if looks else []

    def displace_jobs(self, sequence: Sequence) -> Offer | None:
        """Preempt as many jobs as it takes, the last first, for an interactive sequence to get its :meth:`offer`."""
        jobs = [each for each in self.running.occupied() if each.request.level == JOB]
        most = self.pool.num_free + sum(len(each.blocks) for each in jobs)
        if not jobs or most < -(-len(sequence.tokens) // self.block_size):
            return None
        offer = self.offer(sequence)
        while offer is None and jobs:
            self._preempt(jobs.pop())
            offer = self.offer(sequence)
        return offer

    def _outstanding_blocks(self) -> int:
        """Blocks that the tokens of running sequences will need and have not got yet."""
        missing = self.running.total - self.running.capacity
        return int((-(-missing.clip(min=0) // self.block_size)).sum())

    def bind(self, sequence: Sequence, offer: Offer) -> None:
        """Give the sequence a slot and what is there of it; the first plan that schedules it tells the executor. What
        lies on the host is loaded with the next plan."""
        returns = self._swapped(sequence) is not None
        if sequence.swapped is not None and not returns:
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
        if self.suspended or len(self.in_flight) >= self.depth:
            return None
        if not len(self.running) and not self.builder.freed_slots:
            return None  # the usual case of an idle replica, without arrays
        behind = self.tier.hold_back(self.running.behind())
        slots: Slots = behind.nonzero()[0]
        counts = behind[slots]
        num_decodes = len(slots)
        if num_decodes and int(counts.max()) > 1:
            slots, counts, num_decodes = self._share_budget(now_s, slots, counts)
        if len(slots):
            slots, counts, num_decodes = self._allot_blocks(slots, counts, num_decodes)
        if not len(slots) and (self.in_flight or not self.builder.freed_slots):
            return None
        self.tier.finish_plan(self.step + 1)
        entering = self._enter(slots) if self._bound else []
        self._send_off(slots, counts, num_decodes)
        return self.builder.build(self.step, now_s, num_decodes, slots, counts), entering

    def _share_budget(self, now_s: float, slots: Slots, behind: Int32Array) -> tuple[Slots, Int32Array, int]:
        """Who computes how much: all decodes, then chunks of the others, best first, while the budget lasts."""
        run, decodes = self.running, slots[behind == 1]
        budget = self.budget - len(decodes)
        wanted = dict(zip(slots.tolist(), behind.tolist(), strict=True))
        others = sorted(slots[behind > 1].tolist(), key=lambda each: run.at(each).key)
        if self.pacer is not None and len(decodes):
            work = Work(decodes=len(decodes), decode_context=int(run.computed[decodes].sum()))
            prefills = [prefill_of(run.at(slot), int(run.computed[slot]), wanted[slot]) for slot in others]
            amounts = self.pacer.share(now_s, work, prefills, budget)
        else:
            amounts = []
            for slot in others:
                amounts.append(min(wanted[slot], budget))
                budget -= amounts[-1]
        chosen = {slot: amount for slot, amount in zip(others, amounts, strict=True) if amount}
        rows = np.concatenate((decodes, np.fromiter(chosen, np.intp, len(chosen))))
        counts = np.ones(len(rows), np.int32)
        counts[len(decodes) :] = list(chosen.values())
        return rows, counts, len(decodes)

    def _allot_blocks(self, slots: Slots, counts: Int32Array, num_decodes: int) -> tuple[Slots, Int32Array, int]:
        """Blocks for exactly the scheduled tokens. Where they do not suffice for all rows, some get less or nothing."""
        run, size = self.running, self.block_size
        missing = run.computed[slots] + counts
        missing -= run.capacity[slots]
        rows = np.flatnonzero(missing > 0)
        if not len(rows):
            return slots, counts, num_decodes
        needed = -(-missing[rows] // size)
        total = int(needed.sum())
        if total > self.pool.num_free:
            return self._contend(slots, counts)
        blocks = self.pool.allocate(total)
        short = slots[rows]
        run.capacity[short] += needed * size
        start = 0
        for slot, count in zip(short.tolist(), needed.tolist(), strict=True):
            self.builder.append(run.at(slot), blocks[start : start + count])
            start += count
        return slots, counts, num_decodes

    def _contend(self, slots: Slots, counts: Int32Array) -> tuple[Slots, Int32Array, int]:
        """Too few blocks: the best sequence takes what it needs, then the next.

        To go on by one token at least, a sequence preempts those behind it in order, the last first (before them any
        that only waits for its last token). If there are none it keeps its blocks and waits. So the best one always
        goes on, and there is no deadlock.
        """
        run, pool, size = self.running, self.pool, self.block_size
        wanted = dict(zip(slots.tolist(), counts.tolist(), strict=True))
        behind = run.behind()
        order = run.occupied()
        victims = [each for each in order if behind[each.slot]] + [each for each in order if not behind[each.slot]]
        granted: dict[int, int] = {}
        for sequence in order:
            slot = sequence.slot
            if slot not in wanted:  # also when it has just been preempted: its slot is -1 then
                continue
            start, have = int(run.computed[slot]), int(run.capacity[slot])
            while start == have and not pool.num_free and victims[-1] is not sequence:
                self._preempt(victims.pop())
            count = min(wanted[slot], have + pool.num_free * size - start)
            if count <= 0:
                continue
            blocks = max(0, -(-(start + count - have) // size))
            self.builder.append(sequence, pool.allocate(blocks))
            run.capacity[slot] += blocks * size
            granted[slot] = count
        rows = np.fromiter(granted, np.intp, len(granted))
        amounts = np.fromiter(granted.values(), np.int32, len(granted))
        is_decode = behind[rows] == 1
        first = decodes_first(is_decode)
        return rows[first], amounts[first], int(is_decode.sum())

    def _preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks away. The tokens are kept, and computed again later unless the host tier keeps their
        blocks. (One that only waits for its last token will need no blocks any more.)"""
        slot, run = sequence.slot, self.running
        self.num_preemptions += sequence.entered
        if sequence.entered and run.computed[slot] < run.last[slot]:
            self.tier.swap_out(self, sequence, int(run.computed[slot]), int(run.indexed[slot]))
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
        if not samples.all():
            sample_slots, sample_ids = slots[samples], ids[samples]
        self.in_flight.append(InFlight(self.step, slots, ids, counts, sample_slots, sample_ids))

    # -- results ------------------------------------------------------------------------------------------------------
    def take_result(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Tokens and blocks of one step are known now; returns the sequences that ended, each with ``ends``.

        Raises:
            ProtocolError: the result contradicts the plans; nothing has changed.
        """
        if result.step <= self.landing.landed:
            return []  # a repeat
        arrival = self.landing.match(self.in_flight[0] if self.in_flight else None, result)
        self.tier.copied_step = max(self.tier.copied_step, min(result.copied_step, result.step))
        if self.pacer is not None:
            self.pacer.done(result.launched_s, result.done_s)
        self.landing.confirm(self.in_flight.popleft(), self._list_blocks if self.caching else None)
        return self.landing.take(arrival, result)

    def _list_blocks(self, slots: Slots) -> None:
        """List the blocks that have become full of confirmed tokens."""
        run, size = self.running, self.block_size
        full = run.confirmed[slots] // size
        for row in np.flatnonzero(full > run.indexed[slots]).tolist():
            slot, end = int(slots[row]), int(full[row])
            sequence = run.at(slot)
            sequence.extend_hashes(size)
            for i in range(int(run.indexed[slot]), end):
                self.index.insert(sequence.hashes[i], sequence.blocks[i])
            run.indexed[slot] = end

    # -- leaving ------------------------------------------------------------------------------------------------------
    def remove(self, sequence: Sequence) -> None:
        """The sequence gives up slot and blocks. Its state is the caller's to set."""
        if sequence.entered:
            self.builder.freed_slots.append(sequence.slot)
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
        sequences = [sequence for sequence in self._bound.values() if not sequence.started]
        for sequence in sequences:
            self.remove(sequence)
            sequence.state = State.WAITING
        return sequences

    def give_up(self) -> list[Sequence]:
        """The replica is gone: all its sequences, with the tokens that are known, ready to run elsewhere. Those that
        were landing are not among them (they are queued already)."""
        sequences = self.running.occupied()
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
        assert len(self.in_flight) <= self.depth
        assert [flight.step for flight in self.in_flight] == [*range(self.landing.landed + 1, self.step + 1)]
        self.landing.check_integrity()
        for sequence in sequences:
            listed = int(self.running.indexed[sequence.slot])
            assert len(sequence.hashes) >= listed or not self.caching
