"""Decides which sequences run on which replica, and what each replica computes next.

:class:`WaitingQueue` owns the queue; each :class:`Replica` owns its slots, block pool and prefix index. The planner
connects them: it gives slots to waiting sequences, plans steps for replicas whose pipelines have room, requeues
preempted sequences, and adds and removes replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

import numpy as np

from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core.admission import admit
from pagebus.actors.scheduler.core.delivery import Delivery
from pagebus.actors.scheduler.core.fair_share import FairShare
from pagebus.actors.scheduler.core.placement import send_ahead
from pagebus.actors.scheduler.core.waiting import JobQueue, WaitingQueue
from pagebus.actors.scheduler.events import (
    MOVED,
    PARKED,
    PREEMPTED,
    BlocksPulled,
    Note,
    Output,
    Preempted,
    ReplicaJoined,
    ToJournal,
    ToReplica,
)
from pagebus.actors.scheduler.fleet.auto_roles import AutoRoles
from pagebus.actors.scheduler.fleet.fleet import Fleet
from pagebus.actors.scheduler.fleet.neighbours import Neighbours
from pagebus.actors.scheduler.fleet.roles import Roles
from pagebus.actors.scheduler.moves.leaving import Leaving
from pagebus.actors.scheduler.moves.pulls import FIRST_PULLS, Pulls
from pagebus.actors.scheduler.order import JOB
from pagebus.actors.scheduler.replica.preemption import end, preempt
from pagebus.actors.scheduler.replica.prefill_pacing import Pacer
from pagebus.actors.scheduler.replica.replica import Replica
from pagebus.actors.scheduler.request import MOST_LOSSES, Request, Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import AdapterRead, DiskReport, PullReport, SequencesNamed


class Planner:
    """Plans for all replicas. Its messages, and announcements of entering sequences by ``delivery``, go to ``out``."""

    def __init__(self, config: CoreConfig, delivery: Delivery, out: list[Output]) -> None:
        self.replicas: dict[str, Replica] = {}
        self.fleet = Fleet()
        self.waiting = WaitingQueue()
        self.jobs = JobQueue(config.priority_aging_s)
        self.fair_share = FairShare()
        self.next_steps: dict[str, int] = {}
        """First step number of absent replicas, if it is not 1."""
        self.num_queued_requests = 0
        self.pulls = Pulls()
        self.roles = Roles(config.num_prefill)
        self.auto_roles = AutoRoles(self.roles, config.itl_target_s) if config.auto_roles else None
        self.neighbours = Neighbours(self.pulls, self.roles)
        self._config = config
        self._delivery = delivery
        self._out = out
        self._past_preemptions = 0
        self._leaving = Leaving()

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions for want of blocks, so far."""
        return self._past_preemptions + sum(replica.counts.num_preemptions for replica in self.replicas.values())

    # -- requests -----------------------------------------------------------------------------------------------------
    def enqueue(self, request: Request) -> None:
        """Account for a request whose sequences are about to be queued."""
        if request.priority_class == JOB:
            self.jobs.add(request)
        elif request.client:
            self._charge(request)
        self.num_queued_requests += request.queued

    def _charge(self, request: Request) -> None:
        """Set a request's start and deadline by its client's fair share."""
        num_tokens = len(request.prompt) + request.sampling.n * (request.sampling.max_tokens or 0)
        start_s = self.fair_share.start(request.client, request.weight, num_tokens, request.start_s)
        request.charge(num_tokens, start_s)

    def dismiss(self, request: Request) -> None:
        """Account for the end of a request."""
        self.jobs.discard(request)
        self._has_run(request)
        if request.num_charged:
            num_output = sum(len(each.tokens) - len(request.prompt) for each in request.sequences)
            num_used = len(request.prompt) - (request.num_cached or 0) + num_output if request.started_s else 0
            self.fair_share.give_back(request.client, request.weight, request.num_charged - num_used)
            request.charge(0, request.start_s)

    def _has_run(self, request: Request) -> None:
        self.num_queued_requests -= request.has_run()

    def withdraw(self, sequence: Sequence) -> None:
        """End a sequence in any state, and free everything it holds."""
        self._forget_swapped(sequence)
        if sequence.in_slot:
            assert sequence.replica is not None
            replica = self.replicas[sequence.replica]
            self.fleet.touch(replica)
            end(replica, sequence)
            return
        if sequence.state is State.PREEMPTED_IN_FLIGHT:
            assert sequence.replica is not None
            self.replicas[sequence.replica].step_results.drop(sequence)
        self.waiting.remove(sequence)
        sequence.become(State.ENDED)

    def interrupt(self, sequence: Sequence) -> None:
        """Take a running sequence off its replica, so that it enters a batch again. Beam searches are not announced
        before their end and go on."""
        if sequence.in_slot and sequence.replica is not None and sequence.beam_group is None:
            replica = self.replicas[sequence.replica]
            preempt(replica, sequence, parked=True)
            self.fleet.touch(replica)
            self.requeue(replica, PARKED)
        if sequence.scores_prompt:  # or what it has told would not be told again
            self._forget_swapped(sequence)

    def _forget_swapped(self, sequence: Sequence) -> None:
        """Release the sequence's blocks in a host tier, if it has any."""
        if sequence.swapped is not None:
            self.replicas[sequence.swapped.replica].host_tier.forget(sequence)

    # -- planning -----------------------------------------------------------------------------------------------------
    def plan(self, now_s: float, *, frozen: bool = False) -> Iterator[None]:
        """Admit sequences and plan one step for each replica whose pipeline has room. Each iteration plans one more.
        ``frozen``: an operator holds the work, and nothing is planned."""
        if frozen:
            self._touch(self.pulls.settle())
            return
        self._promote(now_s)
        if self.auto_roles is not None and self.auto_roles.look(now_s):
            self._out.append(Note("roles have changed", {"prefill": self.roles.num_prefill}))
            self.touch_all()
        for replica in self.fleet.with_disks:
            if replica.disk_tier.gives_up(now_s):
                self._out.append(Note("a disk does not answer", {"replica": replica.name}))
        self.pulls.give_up(now_s)
        progress, share = True, FIRST_PULLS
        while progress:  # an admission that comes to no plan (preempted at once) is not tried again before news come
            most_full = self.pulls.num_full + share
            self._admit(most_full)
            self._touch(self.pulls.order())  # so that plans carry those that may begin
            progress = self.pulls.num_full >= most_full  # these begin, and the others are admitted meanwhile
            share *= 2
            for replica in self.fleet.take_due():
                progress |= self._plan(replica, now_s)
            yield
            progress |= self._touch(self.pulls.settle()) and len(self.waiting) > 0
        for replica in self._leaving.ready(self.replicas, self.pulls):
            self._out.append(ToReplica(replica.name, replica.last_plan(now_s)))

    def _touch(self, replicas: Iterable[Replica]) -> bool:
        """Mark these as possibly having something new to plan; whether there are any."""
        touched = list(replicas)
        for replica in touched:
            self.fleet.touch(replica)
        return bool(touched)

    def _plan(self, replica: Replica, now_s: float) -> bool:
        """Plan the next step of a replica; False if it has nothing to do."""
        planned = replica.plan(now_s)
        if replica.preempted:
            self.requeue(replica)
        if planned is None:
            self.fleet.outdate(replica)  # beams may have forked all the same
            return False
        self.fleet.touch(replica)
        plan, entering = planned
        if entering:
            self._out.append(ToJournal(_named(replica, entering)))
        for sequence in entering:
            sequence.request.start(now_s)
            self._delivery.start(sequence)
        self._out.append(ToReplica(replica.name, plan))
        if self.auto_roles is not None:
            self.auto_roles.demand.planned(replica, plan)
        if self.roles.is_on:
            send_ahead(replica, self.fleet, self.pulls, self.roles)
            if self.roles.hand_over(replica, self.pulls):
                self.requeue(replica, MOVED)
        return True

    def _admit(self, most_full: int) -> None:
        """Give slots to waiting sequences until ``most_full`` pulls are full. Jobs preempted for them are queued again,
        and may find room elsewhere."""
        displaced = bool(self._delivery.detokenizers)
        while displaced and len(self.waiting):
            for sequence in admit(self.waiting, self.fleet, self.pulls, self.roles, self.neighbours, most_full):
                self.waiting.remove(sequence)
                self.neighbours.admitted(sequence)
                if self.auto_roles is not None:
                    self.auto_roles.admitted(sequence)
                self._has_run(sequence.request)
                self.fair_share.serve(sequence.request.client, sequence.request.start_s)
            displaced = False
            for replica in self.fleet.changed():
                if replica.preempted:
                    displaced = True
                    self.requeue(replica)

    def _promote(self, now_s: float) -> None:
        """Turn the oldest job into an interactive request, if one is due."""
        request = self.jobs.pop_due(now_s)
        if request is None:
            return
        queued = [each for each in request.sequences if each.is_queued]
        for sequence in queued:
            self.waiting.remove(sequence)
        request.promote(self.fair_share.not_after(now_s))
        for sequence in request.sequences:
            if sequence.in_slot and sequence.replica is not None:
                replica = self.replicas[sequence.replica]
                for each in (sequence,) if sequence.beam_group is None else sequence.beam_group.members:
                    replica.slots.promote(each.slot)
                self.fleet.touch(replica)
        for sequence in queued:
            self.waiting.add(sequence)

    def requeue(self, replica: Replica, why: str = PREEMPTED) -> None:
        """Queue the sequences that have lost their slots on a replica again."""
        self.fleet.outdate(replica)
        for sequence in replica.take_preempted():
            self.waiting.add(sequence)
            swapped = sequence.swapped is not None
            told = MOVED if self.neighbours.has(sequence) else why
            self._out.append(Preempted(sequence.request.id, sequence.id, replica.name, swapped, told))

    def touch_all(self) -> None:
        """Mark all replicas as possibly having something new to plan."""
        self._touch(self.replicas.values())

    def reset_caches(self, *, host: bool, running: bool) -> None:
        """Empty the prefix indexes; with ``host``, those of the host tiers too. ``running``: also recompute running
        sequences other than beam searches from their first token."""
        for replica in self.replicas.values():
            if running:
                for sequence in replica.slots.occupied():
                    self.interrupt(sequence)
                replica.host_tier.forget_all()
            replica.index.clear()
            replica.adapters.list_again()
            if host or running:
                replica.host_tier.pool.forget_cached()
                replica.disk_tier.forget()
        self.pulls.void_all()
        self.touch_all()

    # -- replicas -----------------------------------------------------------------------------------------------------
    def join(self, joined: ReplicaJoined) -> None:
        """Add a replica, or replace it by its new executor.

        Raises:
            ValueError: it does not fit these settings; nothing has changed.
        """
        if joined.block_size != self._config.block_size:
            raise ValueError(f"its block size is {joined.block_size}, the deployment's is {self._config.block_size}")
        if min(joined.num_blocks, joined.max_num_seqs, joined.max_num_batched_tokens, joined.max_model_len) < 1:
            raise ValueError("its capacities must all be at least 1")
        self.lose(joined.replica, "joined anew")
        self.replicas[joined.replica] = Replica(
            joined,
            depth=self._config.pipeline_depth,
            caching=self._config.enable_prefix_caching,
            first_step=self.next_steps.get(joined.replica, 1),
            pacer=self._new_pacer(joined),
            preemption_mode=self._config.preemption_mode,
            most_tokens=self._config.max_num_scheduled_tokens,
            window=self._config.window,
        )
        self._regroup()
        who = {"replica": joined.replica, "epoch": joined.epoch, "num_blocks": joined.num_blocks}
        self._out.append(Note("replica joined", who))

    def _regroup(self) -> None:
        """Tell everything that depends on the set of replicas that it has changed."""
        self.fleet = Fleet(self.replicas.values(), self.fleet.prefix_directory)
        self.roles.assign(self.fleet)
        self.neighbours.assign(self.fleet)
        if self.auto_roles is not None:
            self.auto_roles.assign(self.fleet)
        for replica in self.fleet.replicas:
            others = [each for each in self.fleet.neighbours(replica) if each is not replica]
            keeps = partial(self.pulls.keeps_elsewhere, replica, others)
            replica.host_tier.let_go_first(keeps if others else None)

    def _new_pacer(self, joined: ReplicaJoined) -> Pacer | None:
        itl_s, ttft_s = self._config.itl_target_s, self._config.ttft_target_s
        return None if itl_s is None else Pacer(itl_s, ttft_s, joined.prefill_tokens_per_s)

    def grow_host_tier(self, name: str, num_host_blocks: int) -> None:
        """A replica's executor has more memory for its host tier: this many blocks in all."""
        if name in self.replicas:
            self.replicas[name].host_tier.grow(num_host_blocks)

    def adapter_read(self, read: AdapterRead, epoch: int) -> str:
        """A replica's executor has read an adapter, or a rank of it cannot. Returns the error, if any, once all ranks
        have reported; then no request can have the adapter anywhere."""
        replica = self.replicas.get(read.replica)
        if replica is None or read.executor_epoch != replica.epoch or read.scheduler_epoch != epoch:
            return ""
        error = replica.adapters.take(read)
        self.fleet.touch(replica)
        return error

    def disk_report(self, report: DiskReport, epoch: int) -> None:
        """Apply a report about orders to a replica's disk."""
        replica = self.replicas.get(report.replica)
        if replica is not None and report.executor_epoch == replica.epoch and report.scheduler_epoch == epoch:
            replica.disk_tier.take(report)
            self.fleet.touch(replica)

    def pull_report(self, report: PullReport, epoch: int) -> None:
        """Apply a report about a pull."""
        replica = self.replicas.get(report.replica)
        if replica is not None and report.executor_epoch == replica.epoch and report.scheduler_epoch == epoch:
            if blocks := self.pulls.take(report, replica):
                self._out.append(BlocksPulled(replica.name, blocks))
            self.touch_all()

    def suspend(self, name: str, *, drains: bool = False) -> None:
        """Give a replica no more plans. If it drains and can lend its blocks, its sequences leave at once."""
        replica = self.replicas.get(name)
        if replica is None or replica.suspended:
            return
        swapped = replica.host_tier.swapped if replica.kv_host else []
        replica.suspend()
        self.pulls.suspend(replica)
        self.roles.assign(self.fleet)
        if drains and replica.kv_address:
            self._leaving.begin(replica, replica.move_out() + swapped)
            self.requeue(replica, MOVED)
        self.touch_all()

    def lose(self, name: str, reason: str) -> list[Request]:
        """Remove a replica and queue its sequences. Returns requests that have lost their last permitted executor."""
        replica = self.replicas.pop(name, None)
        if replica is None:
            return []
        self.next_steps[name] = replica.step + 1
        self._regroup()
        self._past_preemptions += replica.counts.num_preemptions
        self.pulls.lose(replica)
        self._leaving.lose(name)
        sequences = replica.give_up()
        for sequence in sequences:
            sequence.note_loss()
            self.waiting.add(sequence)
        who = {"replica": name, "reason": reason, "requests": [each.request.id for each in sequences]}
        self._out.append(Note("replica left", who))
        return list({each.request.id: each.request for each in sequences if each.num_losses >= MOST_LOSSES}.values())

    def take_back(self) -> None:
        """Queue sequences that have a slot but were never announced: there is no detokenizer to announce them to."""
        self.touch_all()
        for replica in self.replicas.values():
            for sequence in replica.take_back():
                self.waiting.add(sequence)

    def placed(self) -> Iterator[Sequence]:
        """All live sequences: the waiting ones, then those in slots."""
        return chain(self.waiting, *(replica.slots.occupied() for replica in self.replicas.values()))

    def check_integrity(self) -> None:
        """The owners of slots and blocks agree.

        Raises:
            AssertionError: they do not.
        """
        self.waiting.check_integrity()
        self.jobs.check_integrity()
        for replica in self.replicas.values():
            replica.check_integrity(self.pulls.owned(replica), self.pulls.owned_hosts(replica))
            assert not replica.preempted, "preempted sequences were not queued"
        self.fleet.check_integrity()
        self.pulls.check_integrity()


def _named(replica: Replica, entering: Iterable[Sequence]) -> SequencesNamed:
    sequences = list(entering)
    return SequencesNamed(
        replica=replica.name,
        executor_epoch=replica.epoch,
        request_ids=tuple(sequence.request.id for sequence in sequences),
        sequence_ids=np.array([sequence.id for sequence in sequences], np.int32),
        choice_indexes=np.array([sequence.choice_index for sequence in sequences], np.int32),
    )
