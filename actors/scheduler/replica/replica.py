"""One replica: binds sequences to slots, plans steps, and applies results.

Plans are executed strictly in order, and a plan's frees precede its rows. So a slot or block released while older steps
that use it are in flight can be reused by the very next plan, and a block of prompt tokens can be shared from the next
plan on. Sampled tokens, however, count as known only once the result of their step has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from pagebus.actors.scheduler.replica.beam_group import (
    Candidates,
    candidates,
    check_integrity,
    choose_next,
    fork_members,
    record,
    take_slots,
)
from pagebus.actors.scheduler.replica.drafts.drafting import add_drafts
from pagebus.actors.scheduler.replica.pipeline import hold_back
from pagebus.actors.scheduler.replica.plan_builder import InFlight
from pagebus.actors.scheduler.replica.preemption import give_back, move_out
from pagebus.actors.scheduler.replica.prefix_match import Offer
from pagebus.actors.scheduler.replica.slots import Slots
from pagebus.actors.scheduler.replica.state import ReplicaBase
from pagebus.actors.scheduler.replica.token_budget import (
    Shared,
    allot_blocks,
    by_adapter,
    give_back_blocks,
    share_budget,
)
from pagebus.actors.scheduler.request import Sequence
from pagebus.bus.messages import END_LENGTH, Int32Array, StepPlan, StepResult
from pagebus.bus.messages.field_types import no_ints


class Replica(ReplicaBase):
    """One replica as the core drives it: :meth:`bind`, :meth:`plan`, :meth:`take_result`, and the ways in which it
    leaves."""

    # -- admission -----------------------------------------------------------------------------------------------------
    def bind(self, sequence: Sequence, offer: Offer) -> None:
        """Give the sequence a slot and the blocks of its offer. The first plan that schedules it informs the executor.
        Host blocks are loaded with the next plan. No other replica's host tier may hold blocks of the sequence."""
        windowed = offer.windowed
        self.pool.retain(offer.cached_blocks + windowed.cached)
        self.host_tier.pool.retain(offer.host_blocks + windowed.hosts)
        if sequence.request.adapter is not None:
            self.adapters.use(sequence.request.digest)
        loaded = self.pool.allocate(len(offer.host_blocks) + len(windowed.hosts))
        blocks = offer.cached_blocks + loaded[: len(offer.host_blocks)]
        pages = windowed.cached + loaded[len(offer.host_blocks) :]
        if offer.fork is not None and offer.fork.copied:
            self.pool.retain(offer.fork.copied)
            own, own_pages = self.allocate(1)
            sequence.copy_into(offer.fork.copied, own + own_pages)
            blocks, pages = blocks + own, pages + own_pages
        sequence.hold(blocks, pages, offer.num_tokens, (offer.first_block, windowed.first))
        sequence.limit_to(self.max_model_len)
        sequence.belong_to(self.name)
        self.slots.enter(sequence, sequence.num_cached)
        self.depth.chances.clear(sequence.slot)
        if len(sequence.request.prediction):
            self.depth.watch.wake()
        self.bound[sequence.slot] = sequence
        if sequence.beam_group is not None:
            self.bound.update({member.slot: member for member in take_slots(self, sequence.beam_group)})
            self.searches[sequence.id] = sequence.beam_group
        if loaded:
            hosts = offer.host_blocks + windowed.hosts
            self.host_tier.load(sequence, loaded, hosts, sequence.first_block + len(offer.cached_blocks))
        if self.disk_tier.is_on:
            self.offer_to_disk(sequence, 0, offer.num_tokens // self.block_size)
        if self.caching and not sequence.looked_up and sequence.leader is None:
            sequence.look_up()
            found = (offer.first_block + len(offer.cached_blocks)) * self.block_size
            self.counts.looked_up(len(sequence.tokens), found)
            self.host_tier.count_lookup(len(sequence.tokens) - found, sequence.num_cached - found)

    # -- planning ------------------------------------------------------------------------------------------------------
    def plan(self, now_s: float) -> tuple[StepPlan, list[Sequence]] | None:
        """The next step, and the sequences that enter the batch with it. None if there is nothing to do or the pipeline
        is full. Sequences preempted for it are added to ``preempted``."""
        asks = self.host_tier.is_asked
        if self.suspended and not asks:
            return None
        if not self.pipeline.has_room:
            return self._plan_orders(now_s)
        urgent = self.adapters.loaded or self.disk_tier.is_urgent or self.builder.pulled or asks
        if not len(self.slots) and not (urgent or self._has_news):
            return None  # the usual case of an idle replica, without arrays
        for group in self.searches.values():
            if not group.is_complete:
                fork_members(self, group)
        slots, counts, num_decodes = self._choose(now_s, in_turn=True)
        if not len(slots) and not self.in_flight and len(self.slots):
            slots, counts, num_decodes = self._choose(now_s, in_turn=False)  # nobody whose turn it is gets blocks
        if not len(slots) and not urgent and (self.in_flight or not self._has_news):
            return None
        self.disk_tier.finish_plan()  # before blocks are listed that this plan only loads: its copies out come first
        self.host_tier.finish_plan(self.step + 1)
        entering = self._enter(slots) if self.bound else []
        for member in self.builder.rewritten:
            self.drop_source(member)
        plan = self._build(now_s, slots, counts, num_decodes)
        if self.kept.num_tokens:
            give_back_blocks(self, slots)
        return plan, entering

    def _plan_orders(self, now_s: float) -> tuple[StepPlan, list[Sequence]] | None:
        """A plan without rows beside a full pipeline, if there are pulls that may begin before its steps are done."""
        if not (self.builder.pulled.are_urgent and self.pipeline.has_room_for_orders):
            return None
        self.disk_tier.finish_plan()
        self.host_tier.finish_plan(self.step + 1)
        for member in self.builder.rewritten:
            self.drop_source(member)
        return self._build(now_s, np.empty(0, np.intp), no_ints(), 0), []

    def _build(
        self, now_s: float, slots: Slots, counts: Int32Array, num_decodes: int, *, is_last: bool = False
    ) -> StepPlan:
        """Count the rows as computed, and make the plan."""
        drafted = add_drafts(self, slots, counts, num_decodes) if self.slots.num_drafts else None
        if drafted is None:
            self._send_off(slots, counts, num_decodes)
            return self.builder.build(self.step, now_s, num_decodes, slots, counts, is_last=is_last)
        self._send_off(drafted.slots, counts, num_decodes, drafted.drafts)
        return self.builder.build(
            self.step, now_s, drafted.num_plain, drafted.slots, drafted.num_scheduled(counts),
            drafted.earliest, drafted.latest, is_last=is_last,
        )  # fmt: skip

    @property
    def _has_news(self) -> bool:
        """Whether an idle executor gets a plan: to free slots, or for the disk."""
        return bool(self.builder.freed_slots) or self.disk_tier.has_news

    def _choose(self, now_s: float, *, in_turn: bool) -> Shared:
        """The rows of the next step, with blocks for their tokens. ``in_turn``: none that should wait for its blocks
        from the host, or for its lane (:mod:`pagebus.actors.scheduler.replica.pipeline`)."""
        behind = self.slots.behind()
        if in_turn:
            behind = self.host_tier.hold_back(behind)
        if in_turn and self.stages > 1:
            behind = hold_back(self.slots, behind, self.stages, len(self.in_flight))
        slots: Slots = behind.nonzero()[0]
        counts = behind[slots]
        num_decodes = len(slots)
        if num_decodes and int(counts.max()) > 1:
            slots, counts, num_decodes = share_budget(self, now_s, slots, counts)
        shared = allot_blocks(self, slots, counts, num_decodes) if len(slots) else (slots, counts, num_decodes)
        return by_adapter(self.slots.adapter, shared) if self.adapters.capacity else shared

    def _enter(self, slots: Slots) -> list[Sequence]:
        """Enter the bound sequences whose first rows these are."""
        entering = [self.bound.pop(slot) for slot in slots.tolist() if slot in self.bound]
        for sequence in entering:
            self.host_tier.entered(sequence)
            self.builder.enter(sequence)
            self.drop_source(sequence)
        return entering

    def _send_off(self, slots: Slots, counts: Int32Array, num_decodes: int, drafts: Int32Array | None = None) -> None:
        """Count the rows as computed and keep them until their result arrives. The decodes have ``drafts`` [decodes],
        which are counted already."""
        self.step += 1
        self.index.step = self.step
        self.host_tier.pool.index.step = self.step + 1
        num_drafts = 0
        if drafts is not None:
            num_drafts = int(drafts.sum())
            self.depth.prices.planned(self.slots.computed[slots], num_decodes, num_drafts)
        self.prompt_rate.planned(0 if num_decodes else int(counts.sum()))
        if self.pacer is not None:
            self.pacer.planned(self.slots.computed[slots], counts, num_decodes, num_drafts)
        ids = self.slots.ids[slots]
        samples = self.slots.advance(slots, counts, self.step)
        sample_slots, sample_ids = slots, ids
        if np.count_nonzero(samples) < len(slots):
            sample_slots, sample_ids = slots[samples], ids[samples]
        if drafts is not None:
            drafts = np.pad(drafts, (0, len(slots) - num_decodes))[samples] if num_drafts else None
        self.in_flight.append(InFlight(self.step, slots, ids, sample_slots, sample_ids, drafts))
        self.pipeline.planned(len(slots), num_decodes, int(counts.sum()))
        if self.caching and num_decodes < len(slots):
            self.list_blocks(slots[num_decodes:])

    # -- results -------------------------------------------------------------------------------------------------------
    def take_result(self, result: StepResult) -> list[tuple[Sequence, int]]:
        """Apply the result of one step. Returns the sequences that it ended, each with its ``ends`` code.

        Raises:
            ProtocolError: it contradicts the plans; nothing has changed.
        """
        if result.step <= self.step_results.last_step:
            return []  # a repeat
        matched = self.step_results.match(self.in_flight[0] if self.in_flight else None, result)
        found = candidates(self, matched, result) if self.searches else []
        self.host_tier.copied(min(result.copied_step, result.step))
        self.pipeline.done(result.launched_s, result.done_s)
        self.prompt_rate.done(result.launched_s, result.done_s)
        if self.pacer is not None:
            self.pacer.done(result.launched_s, result.done_s)
        if self.slots.num_drafts:
            self.depth.prices.done(result.launched_s, result.done_s)
            runs, none = matched.runs, no_ints()
            self.depth.learn(*(none, none, none) if runs is None else (runs.slots, runs.planned, runs.runs.counts - 1))
        self.step_results.confirm(self.in_flight.popleft(), self.list_blocks if self.caching else None)
        ended = self.step_results.apply(matched, result)
        if matched.runs is not None and self.caching:
            self.list_blocks(matched.runs.slots)  # one that ends here has no later result
        return ended + self._advance_beams(found, result.done_s)

    def has_landed(self, step: int) -> bool:
        """Whether the device's blocks hold what the plans up to this one have put there."""
        return self.step_results.last_step >= step and self.host_tier.has_loaded(step)

    def has_finished_with(self, blocks: list[int]) -> bool:
        """Whether no plan uses these blocks, copies between the tiers included, that has not been carried out."""
        return 0 < self.host_tier.copied_step >= self.pool.last_used(blocks)

    def has_copied(self, step: int) -> bool:
        """Whether the host tier's blocks hold what the plans up to this one copy there."""
        return self.host_tier.copied_step >= step

    def ask_for_copies(self) -> bool:
        """Send a plan, perhaps an empty one, whose result reports the finished copies between the tiers. False if the
        result of a plan in flight will do so, or if there can be no plan."""
        asks = not self.in_flight and not (self.suspended and len(self.slots))
        if asks:
            self.host_tier.ask()
        return asks

    def _advance_beams(self, found: list[Candidates], done_s: float) -> list[tuple[Sequence, int]]:
        """Choose for searches whose candidates are complete. Returns the leaders of searches that are over."""
        over = []
        for each in found:
            group = each.member.beam_group
            assert group is not None
            if record(group, each):
                group.leader.request.got_token(done_s)
                if choose_next(self, group):
                    over.append((group.leader, END_LENGTH))
        return over

    # -- leaving -------------------------------------------------------------------------------------------------------
    def suspend(self) -> None:
        """Plan nothing more here. Swapped sequences may run elsewhere at once."""
        self.suspended = True
        self.host_tier.forget_all()

    def move_out(self) -> list[Sequence]:
        """Take all sequences off a suspended replica whose executor drains. They are in ``preempted``, too."""
        sequences = [sequence for sequence in self.slots.occupied() if sequence is sequence.head]
        for sequence in sequences:
            move_out(self, sequence)
        return sequences

    def last_plan(self, now_s: float) -> StepPlan:
        """The plan that lets the executor of a suspended replica end; nothing is in flight, and it lends no more."""
        self.kv_kind = ""
        return self._build(now_s, np.empty(0, np.intp), no_ints(), 0, is_last=True)

    def take_back(self) -> list[Sequence]:
        """Take slots from sequences that were never announced, and return these."""
        sequences = [sequence for sequence in self.bound.values() if not sequence.started]  # no beam but the leader
        for sequence in sequences:
            give_back(self, sequence)
        return sequences

    def give_up(self) -> list[Sequence]:
        """Take all sequences off a lost replica, with their known tokens, ready to run elsewhere. Those preempted in
        flight are not returned: they are queued already."""
        sequences = [sequence for sequence in self.slots.occupied() if sequence is sequence.head]
        for sequence in sequences:
            give_back(self, sequence)
        self.host_tier.forget_all()
        self.step_results.release_all()
        self.in_flight.clear()
        self.suspended = True
        return sequences

    def check_integrity(self, pulled: Iterable[int] = (), pulled_hosts: Iterable[int] = ()) -> None:
        """Slots, blocks, index and pipeline agree. ``pulled``: blocks that pulls hold, ``pulled_hosts``: those of the
        host tier.

        Raises:
            AssertionError: they do not.
        """
        self.slots.check_integrity()
        sequences = self.slots.occupied()
        sources = [sequence.copied[0] for sequence in sequences if sequence.copied is not None]
        held = chain(*sources, *(sequence.pages for sequence in sequences), self.adapters.held_blocks())
        self.pool.check_integrity(chain(held, pulled))
        assert all(sequence.replica == self.name for sequence in sequences)
        assert {sequence.slot for sequence in sequences if not sequence.entered} == set(self.bound)
        self.host_tier.check_integrity(sequences, chain(self.disk_tier.owned, pulled_hosts))
        self.disk_tier.check_integrity()
        assert len(self.in_flight) == len(self.pipeline) <= self.pipeline.most
        assert [flight.step for flight in self.in_flight] == [*range(self.step_results.last_step + 1, self.step + 1)]
        self.step_results.check_integrity()
        self.adapters.check_integrity(each.request.digest for each in sequences if each is each.head)
        assert sum(group.width for group in self.searches.values()) == self.slots.num_beams
        for group in self.searches.values():
            check_integrity(self, group)
        for sequence in sequences:
            num_windowed = (sequence.end_block - sequence.first_windowed) * self.windowed_pages
            assert len(sequence.windowed) == num_windowed, f"sequence {sequence.id} lacks pages of layers with windows"
            listed = int(self.slots.indexed[sequence.slot])
            assert len(sequence.hashes) >= listed or not self.caching
