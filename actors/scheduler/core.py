"""The scheduler's decisions, as a state machine: inputs and the time in, messages out.

No IO, clock or randomness in here: the same inputs give the same outputs, so that the core can be tested and simulated.
:meth:`Core.take` takes one input in, :meth:`Core.plan` decides what happens next; between two plans any number of
inputs may come. The owners of the state are :class:`Waiting`, and one :class:`Replica` each with its slots, block pool
and prefix index; here are only requests, sequences and their ends.

Every request ends exactly once: its tokens end it (the detokenizer sees that in the results by itself), a stop string
does (:class:`StopSequence`), the client leaves (:class:`AbortRequest`), or it fails (:class:`RequestFailed`). It is
kept beyond that until its client has everything (:mod:`actors.scheduler.delivery`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from actors.scheduler import refusal
from actors.scheduler.admission import admit
from actors.scheduler.delivery import Delivery
from actors.scheduler.events import (
    DetokenizerLost,
    DetokenizersLive,
    HostTierGrown,
    IngressLost,
    Input,
    Note,
    Output,
    ReplicaJoined,
    ReplicaLost,
    ReplicaResult,
    ReplicaSuspended,
    RequestOver,
    ToIngress,
    ToJournal,
    ToReplica,
)
from actors.scheduler.fleet import Fleet
from actors.scheduler.lanes import Lanes
from actors.scheduler.order import INTERACTIVE, JOB, Jobs, Order
from actors.scheduler.output import Output as SequenceOutput
from actors.scheduler.output import Scores, row_scores
from actors.scheduler.pacing import Pacer
from actors.scheduler.replica import Replica
from actors.scheduler.sequence import Request, Sequence, State, make_request, prompt_hashes, seed_of
from actors.scheduler.waiting import Waiting
from bus.messages import (
    END_NONE,
    AbortRequest,
    RequestFailed,
    RequestsDone,
    SequencesNamed,
    StepResult,
    StopSequence,
    TokenizedRequest,
)

RECENT_REQUESTS = 10_000
"""How many ended or unknown but aborted requests are remembered, to recognise repeats and overtaken requests."""
UNLIMITED_TOKENS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """``epoch`` is the scheduler's lease epoch: sequence ids of two schedulers differ. Without ``priorities`` all
    requests have the same; ``priority_aging_s`` is the wait that makes up for one step of it. A request whose client is
    away is kept for ``resume_timeout_s``."""

    block_size: int = 16
    pipeline_depth: int = 2
    max_num_queued_requests: int = 4096
    enable_prefix_caching: bool = True
    preemption_mode: str = "auto"
    priorities: bool = True
    priority_aging_s: float = 30.0
    itl_target_s: float | None = None
    ttft_target_s: float | None = None
    epoch: int = 1
    eos_token_ids: tuple[int, ...] = ()
    resume_timeout_s: float = 30.0


class Core:
    """The whole state of one scheduler."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.replicas: dict[str, Replica] = {}
        self.waiting = Waiting()
        self.jobs = Jobs(config.priority_aging_s)
        self.requests: dict[str, Request] = {}
        self.num_queued_requests = 0
        self._sequences: dict[int, Sequence] = {}
        self._recent: dict[tuple[str, str], None] = {}
        self._next_steps: dict[str, int] = {}
        self._fleet = Fleet()
        self._order_policy = Order(config.priorities, config.priority_aging_s)
        self._num_ids = 0
        self._past_preemptions = 0
        self._order = 0
        self._out: list[Output] = []
        self.delivery = Delivery(lambda output: self._out.append(output), config.resume_timeout_s)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return sum(len(replica.running) for replica in self.replicas.values())

    @property
    def is_idle(self) -> bool:
        """No request runs or waits, and no step is in flight."""
        return not self.requests and not any(replica.in_flight for replica in self.replicas.values())

    @property
    def is_forgettable(self) -> bool:
        """There is no request, not even one that is only kept: a successor would have nothing to know."""
        return not self.requests and not self.delivery.finished

    def skip_steps(self, replica: str, step: int) -> None:
        """Steps up to this one of a replica that has not joined yet are used up."""
        self._next_steps[replica] = step + 1

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give its blocks up, so far."""
        return self._past_preemptions + sum(replica.num_preemptions for replica in self.replicas.values())

    def leftovers(self) -> dict[str, int]:
        """What is held, by name; all 0 when idle."""
        held = {"requests": len(self.requests), "waiting": len(self.waiting), "finished": len(self.delivery.finished)}
        for name, replica in self.replicas.items():
            held[f"{name}: slots"] = len(replica.running)
            held[f"{name}: blocks"] = replica.pool.num_blocks - replica.pool.num_free
            held[f"{name}: host blocks"] = replica.tier.num_held
            held[f"{name}: steps in flight"] = len(replica.in_flight)
        return held

    def take(self, message: Input) -> None:
        """Take one input in.

        Raises:
            ProtocolError: a result that cannot be true; nothing has changed.
            ValueError: a replica that cannot be used with these settings; nothing has changed.
        """
        match message:
            case ReplicaResult():
                self._take_result(message)
            case TokenizedRequest():
                self._take_request(message)
            case AbortRequest():
                self._leave(message)
            case RequestsDone():
                for request_id, attempt in zip(message.request_ids, message.attempts, strict=True):
                    self._settle(request_id, attempt)
            case StopSequence():
                sequence = self._sequences.get(message.sequence_id)
                if sequence is not None and sequence.lanes is None and sequence.request.id == message.request_id:
                    self._end(sequence)
            case ReplicaJoined():
                self._join(message)
            case HostTierGrown():
                if message.replica in self.replicas:
                    self.replicas[message.replica].tier.grow(message.num_host_blocks)
            case ReplicaSuspended():
                if message.replica in self.replicas:
                    self.replicas[message.replica].suspend()
                    self._fleet.touch(self.replicas[message.replica])
            case ReplicaLost():
                self._lose(message.replica, message.reason)
                for request in self._all_requests():
                    if request.detokenizer in message.deaf:
                        self._announce_anew(request)
            case IngressLost():
                for request in self._all_requests():
                    if request.ingress == message.ingress and not request.away:
                        self.delivery.leave(request)
            case DetokenizersLive():
                self._set_detokenizers(message.names)
            case DetokenizerLost():
                self._lose_detokenizer(message.detokenizer)

    def plan(self, now_s: float) -> list[Output]:
        """Everything to be sent now, in this order: the answers to what was taken in, then the plans for every replica
        whose pipeline has room, each after the SequenceStarted of the sequences that enter with it."""
        for request_id in self.delivery.expired(now_s):
            self._abort(request_id)
        self.delivery.announce_ended()
        self._promote(now_s)
        progress = True
        while (
            progress
        ):  # an admission that comes to no plan (it is preempted at once) is not tried again before news come
            self._admit()
            progress = False
            for replica in self._fleet.take_due():
                progress |= self._plan(replica, now_s)
        out, self._out = self._out, []
        return out

    def _plan(self, replica: Replica, now_s: float) -> bool:
        """The next step of a replica; False if it has nothing to do."""
        planned = replica.plan(now_s)
        if replica.preempted:
            self._requeue(replica)
        if planned is None:
            return False
        self._fleet.touch(replica)
        plan, entering = planned
        if entering:
            self._out.append(ToJournal(_named(replica, entering)))
        for sequence in entering:
            self.delivery.start(sequence)
        self._out.append(ToReplica(replica.name, plan))
        return True

    # -- requests -----------------------------------------------------------------------------------------------------
    def _take_request(self, message: TokenizedRequest) -> None:
        known = self.requests.get(message.request_id) or self.delivery.finished.get(message.request_id)
        if known is not None:
            if known.attempt != message.attempt and self.delivery.move(known, message):
                self._announce_anew(known)
        elif (message.request_id, message.attempt) in self._recent:
            self._out.append(RequestOver(message.request_id))
        else:
            self._accept(message, {}, check_load=True)

    def readmit(self, message: TokenizedRequest, outputs: Mapping[int, SequenceOutput]) -> None:
        """A request that a scheduler before this one has accepted, with what is known of its choices."""
        if (message.request_id, message.attempt) in self._recent:
            self._out.append(RequestOver(message.request_id))
        else:
            self._accept(message, outputs, check_load=False)

    def _accept(self, message: TokenizedRequest, outputs: Mapping[int, SequenceOutput], *, check_load: bool) -> None:
        request = make_request(message, self.config.eos_token_ids, self._order_policy)
        refused = refusal.of_message(message) or refusal.of_size(request, self._limit(request), self.replicas.values())
        if refused is None and check_load and self.num_queued_requests >= self.config.max_num_queued_requests:
            refused = refusal.of_load(request, self.config.max_num_queued_requests)
        if refused is not None:
            self._remember(request)
            self._fail(request.ingress, refused)
            self.delivery.over(request)
            return
        self.requests[request.id] = request
        if request.level == JOB:
            self.jobs.add(request)
        self.num_queued_requests += 1
        hashes = prompt_hashes(message, self.config.block_size) if self.config.enable_prefix_caching else []
        if request.sampling.beam_width:
            leader = self._add_sequence(request, 0, hashes)
            leader.lanes = Lanes(leader, self._new_id)
            self._sequences.update(dict.fromkeys(leader.lanes.ids + leader.lanes.choice_ids, leader))
            return  # a search that another scheduler began is begun again
        for choice_index in range(request.sampling.n):
            self._add_sequence(request, choice_index, hashes)
        self._restore(request, outputs)

    def _add_sequence(self, request: Request, choice_index: int, hashes: list[bytes]) -> Sequence:
        self._order += 1
        sequence = Sequence(
            id=self._new_id(),
            request=request,
            choice_index=choice_index,
            seed=seed_of(request.id, request.sampling, choice_index),
            order=self._order,
            limit=self._limit(request),
            tokens=array("i", request.prompt),
            hashes=list(hashes),
        )
        shares = len(request.prompt) >= self.config.block_size or request.sampling.returns_prompt
        if choice_index and shares:
            sequence.leader = request.sequences[0]
        request.sequences.append(sequence)
        request.num_live += 1
        self._sequences[sequence.id] = sequence
        self.waiting.add(sequence)
        return sequence

    def _restore(self, request: Request, outputs: Mapping[int, SequenceOutput]) -> None:
        """Give the sequences of a new request the outputs that they had under another scheduler."""
        for sequence in list(request.sequences):
            output = outputs.get(sequence.choice_index)
            if output is None:
                continue
            sequence.tokens += output.tokens
            sequence.scores, sequence.end = output.scores, output.end
            sequence.produced = bool(output.tokens)
            sequence.scores_again = True
            if output.end != END_NONE:
                self._end(sequence)
        if request.num_live < len(request.sequences):
            self._announce_anew(request)

    def _announce_anew(self, request: Request) -> None:
        """Nobody works on the text of this request: have it made again, from the first token on."""
        self.delivery.silence(request, again=True)
        if request.sampling.prompt_logprobs is not None:
            self._score_again(request)
        for sequence in request.sequences:
            replica = sequence.replica
            if sequence.state is State.RUNNING and replica is not None and sequence.lanes is None:
                replica.preempt(sequence)
                self._fleet.touch(replica)
                self._requeue(replica)

    def _score_again(self, request: Request) -> None:
        """What has become known of the log probabilities of the prompt may be lost: its first sequence computes them
        once more, from the beginning if it has ended."""
        first = request.sequences[0]
        first.scores_again = True
        if first.state is not State.ENDED:
            return
        if self.delivery.revive(request):
            self.requests[request.id] = request
            if request.level == JOB:
                self.jobs.add(request)
        del first.tokens[len(request.prompt) :]
        del first.hashes[len(request.prompt) // self.config.block_size :]
        first.scores, first.end = Scores(), END_NONE
        first.id, first.state = self._new_id(), State.WAITING
        first.limit = self._limit(request)
        request.num_live += 1
        self._sequences[first.id] = first
        self.waiting.add(first)

    def _limit(self, request: Request) -> int:
        max_tokens = request.sampling.max_tokens
        return len(request.prompt) + (UNLIMITED_TOKENS if max_tokens is None else max_tokens)

    def _new_id(self) -> int:
        """An id >= 1 that no living sequence has: 11 bits of the epoch, 20 bits of a counter that starts again."""
        while True:
            self._num_ids = self._num_ids % (2**20 - 1) + 1
            sequence_id = (self.config.epoch % 2047 << 20) + self._num_ids
            if sequence_id not in self._sequences:
                return sequence_id

    # -- starting -----------------------------------------------------------------------------------------------------
    def _admit(self) -> None:
        """Give slots to waiting sequences, and queue the jobs that made room for them."""
        if not len(self.waiting) or not self.delivery.detokenizers:
            return
        for sequence in admit(self.waiting, self._fleet):
            self.waiting.remove(sequence)
            if sequence.request.queued:
                sequence.request.queued = False
                self.num_queued_requests -= 1
        for replica in self._fleet.changed():
            if replica.preempted:
                self._requeue(replica)

    def _promote(self, now_s: float) -> None:
        """The oldest job may have become an interactive request."""
        request = self.jobs.pop_due(now_s)
        if request is None:
            return
        queued = [each for each in request.sequences if each.state in (State.WAITING, State.LANDING)]
        for sequence in queued:
            self.waiting.remove(sequence)
        request.level, request.due_s = INTERACTIVE, now_s
        for sequence in request.sequences:
            if sequence.state is State.RUNNING and sequence.replica is not None:
                for each in (sequence,) if sequence.lanes is None else sequence.lanes.members:
                    sequence.replica.running.promote(each.slot)
                self._fleet.touch(sequence.replica)
        for sequence in queued:
            self.waiting.add(sequence)

    def _requeue(self, replica: Replica) -> None:
        self._fleet.outdate(replica)
        preempted, replica.preempted = replica.preempted, []
        for sequence in preempted:
            self.waiting.add(sequence)
            who = {"request_id": sequence.request.id, "sequence": sequence.id, "replica": replica.name}
            self._note("preempted", swapped=sequence.swapped is not None, **who)

    # -- ending -------------------------------------------------------------------------------------------------------
    def _take_result(self, message: ReplicaResult) -> None:
        replica = self.replicas.get(message.replica)
        if replica is None or message.result.scheduler_epoch != self.config.epoch:
            return  # of a replica that was given up, or for another scheduler
        ended = replica.take_result(message.result)
        if len(message.result.logprob_rows):
            self._keep_scores(message.result)
        for sequence, end in ended:
            sequence.end = end
            self._end(sequence)
        self._fleet.touch(replica)

    def _keep_scores(self, result: StepResult) -> None:
        """Log probabilities may have to be told again."""
        ids, indexes = result.sequence_ids, result.token_indexes
        for score in row_scores(result):
            sequence = self._sequences.get(int(ids[score.row]))
            if sequence is not None and sequence.lanes is None and indexes[score.row] == len(sequence.scores):
                sequence.scores.add(score)

    def _all_requests(self) -> list[Request]:
        return [*self.requests.values(), *self.delivery.finished.values()]

    def _leave(self, message: AbortRequest) -> None:
        """The client has left, unless it has come back meanwhile."""
        request = self.requests.get(message.request_id) or self.delivery.finished.get(message.request_id)
        if request is None:
            self._remember_id(message.request_id, message.attempt)
        elif request.attempt != message.attempt:
            return
        elif message.may_return:
            self.delivery.leave(request)
        else:
            self._abort(request.id)

    def _settle(self, request_id: str, attempt: str) -> None:
        """The client has everything. (The results of the last step may still be on their way to here.)"""
        request = self.requests.get(request_id) or self.delivery.finished.get(request_id)
        if request is None or request.attempt != attempt:
            return
        request.settled = True
        if request.num_live:
            self._end_all(request)
        else:
            self._remember(request)
            self.delivery.over(request)

    def _abort(self, request_id: str) -> None:
        """End a request of which nobody wants to know any more."""
        request = self.requests.get(request_id) or self.delivery.finished[request_id]
        self.delivery.silence(request, again=False)
        request.settled = True
        if request.num_live:
            self._end_all(request)
        else:
            self._remember(request)
            self.delivery.over(request)

    def _end_all(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.state is not State.ENDED:
                self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Free everything the sequence holds; the request ends with its last sequence, and is kept till delivered."""
        request = sequence.request
        if sequence.state is State.RUNNING:
            assert sequence.replica is not None
            self._fleet.touch(sequence.replica)
            sequence.replica.remove(sequence)
        else:
            if sequence.state is State.LANDING:
                assert sequence.replica is not None
                sequence.replica.landing.drop(sequence)
            self.waiting.remove(sequence)
        if sequence.swapped is not None:
            sequence.swapped.replica.tier.forget(sequence)
        sequence.state = State.ENDED
        lanes = sequence.lanes
        for sequence_id in (sequence.id, *(() if lanes is None else lanes.ids + lanes.choice_ids)):
            del self._sequences[sequence_id]
        request.num_live -= 1
        if not sequence.started and not request.settled:
            self.delivery.announce(request)
        if request.num_live:
            return
        del self.requests[request.id]
        self.jobs.discard(request)
        if request.queued:
            request.queued = False
            self.num_queued_requests -= 1
        if request.settled:
            self._remember(request)
            self.delivery.over(request)
        else:
            self.delivery.keep(request)

    def _fail(self, ingress: str, failure: RequestFailed) -> None:
        self._out.append(ToIngress(ingress, failure))
        self._note("request failed", request_id=failure.request_id, status=failure.status, reason=failure.message)

    def _remember(self, request: Request) -> None:
        self._remember_id(request.id, request.attempt)

    def _remember_id(self, request_id: str, attempt: str) -> None:
        self._recent.pop((request_id, attempt), None)
        self._recent[request_id, attempt] = None
        if len(self._recent) > RECENT_REQUESTS:
            del self._recent[next(iter(self._recent))]

    # -- members ------------------------------------------------------------------------------------------------------
    def _join(self, joined: ReplicaJoined) -> None:
        if joined.block_size != self.config.block_size:
            raise ValueError(f"its block size is {joined.block_size}, the deployment's is {self.config.block_size}")
        if min(joined.num_blocks, joined.max_num_seqs, joined.max_num_batched_tokens, joined.max_model_len) < 1:
            raise ValueError("its capacities must all be at least 1")
        self._lose(joined.replica, "joined anew")
        self.replicas[joined.replica] = Replica(
            joined,
            depth=self.config.pipeline_depth,
            caching=self.config.enable_prefix_caching,
            first_step=self._next_steps.get(joined.replica, 1),
            pacer=self._new_pacer(),
            preemption_mode=self.config.preemption_mode,
        )
        self._fleet = Fleet(self.replicas.values())
        self._note("replica joined", replica=joined.replica, epoch=joined.epoch, num_blocks=joined.num_blocks)
        for request in {sequence.request.id: sequence.request for sequence in self.waiting}.values():
            # Only those that never ran: what is under way may still find the replica again that it fits on.
            refused = refusal.of_size(request, self._limit(request), self.replicas.values()) if request.queued else None
            if refused is not None:
                self._fail(request.ingress, refused)
                self._abort(request.id)

    def _new_pacer(self) -> Pacer | None:
        itl_s = self.config.itl_target_s
        return None if itl_s is None else Pacer(itl_s, self.config.ttft_target_s)

    def _lose(self, name: str, reason: str) -> None:
        replica = self.replicas.pop(name, None)
        if replica is None:
            return
        self._next_steps[name] = replica.step + 1
        self._fleet = Fleet(self.replicas.values())
        self._past_preemptions += replica.num_preemptions
        sequences = replica.give_up()
        for sequence in sequences:
            self.waiting.add(sequence)
        self._note("replica left", replica=name, reason=reason, requests=[each.request.id for each in sequences])

    def _set_detokenizers(self, names: Iterable[str]) -> None:
        self.delivery.detokenizers = tuple(sorted(names))
        if self.delivery.detokenizers:
            return
        for replica in self.replicas.values():  # what has a slot but was never started has nobody to be started with
            self._fleet.touch(replica)
            for sequence in replica.take_back():
                self.waiting.add(sequence)

    def _lose_detokenizer(self, name: str) -> None:
        self._set_detokenizers(each for each in self.delivery.detokenizers if each != name)
        for request in self._all_requests():
            if request.detokenizer == name:
                self._announce_anew(request)

    def _note(self, event: str, **fields: object) -> None:
        self._out.append(Note(event, fields))

    def check_integrity(self) -> None:
        """All owners agree with one another, and every living sequence is in exactly one place.

        Raises:
            AssertionError: it is not so.
        """
        self.waiting.check_integrity()
        self.jobs.check_integrity()
        for replica in self.replicas.values():
            replica.check_integrity()
            assert not replica.preempted, "preempted sequences were not queued"
        self._fleet.check_integrity()
        running = chain.from_iterable(replica.running.occupied() for replica in self.replicas.values())
        heads = {sequence.id for sequence in self._sequences.values()}
        places = [each.id for each in chain(self.waiting, running) if each is each.head]
        assert sorted(places) == sorted(heads), "a sequence is nowhere, or in two places"
        living = [each for request in self.requests.values() for each in request.sequences]
        living = [each for each in living if each.state is not State.ENDED]
        assert sorted(each.id for each in living) == sorted(heads), "requests and sequences differ"
        for request in self.requests.values():
            states = [each.state for each in request.sequences]
            assert request.num_live == len(states) - states.count(State.ENDED) > 0, f"request {request.id} is over"
        assert self.num_queued_requests == sum(request.queued for request in self.requests.values())
        self.delivery.check_integrity(self.requests.values())
        assert len(self._recent) <= RECENT_REQUESTS


def _named(replica: Replica, entering: Iterable[Sequence]) -> SequencesNamed:
    sequences = list(entering)
    return SequencesNamed(
        replica=replica.name,
        executor_epoch=replica.epoch,
        request_ids=tuple(sequence.request.id for sequence in sequences),
        sequence_ids=np.array([sequence.id for sequence in sequences], np.int32),
        choice_indexes=np.array([sequence.choice_index for sequence in sequences], np.int32),
    )
