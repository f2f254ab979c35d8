"""The life of requests: accepted or rejected, announced, ended exactly once, forgotten.

A request ends in one of four ways. Its tokens end it (the detokenizer sees that in the results itself), a stop string
does (:class:`StopSequence`), its client leaves (:class:`AbortRequest`), or it fails (:class:`RequestFailed`). It is
then kept until its client has everything (:mod:`pagebus.actors.scheduler.core.delivery`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagebus.actors.scheduler.config import CoreConfig
from pagebus.actors.scheduler.core import validation
from pagebus.actors.scheduler.core.delivery import Delivery
from pagebus.actors.scheduler.core.new_request import make_request, prompt_hashes, seed_of
from pagebus.actors.scheduler.core.planner import Planner
from pagebus.actors.scheduler.events import Note, Output, RequestGivenUp, RequestOver, ToIngress
from pagebus.actors.scheduler.order import JOB, Order
from pagebus.actors.scheduler.replica.beam_group import new_group
from pagebus.actors.scheduler.request import Request, Sequence
from pagebus.actors.scheduler.sequence_output import SequenceOutput, row_scores
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import (
    END_NONE,
    HOLD_ABORT,
    HOLD_NONE,
    HOLD_WAIT,
    AbortRequest,
    AlsoReads,
    RequestFailed,
    StepResult,
    StopSequence,
    TokenizedRequest,
)

RECENT_REQUESTS = 10_000
"""Number of ended requests, and of aborts of unknown ones, remembered to recognise repeated and overtaken messages."""
UNLIMITED_TOKENS = 2**30

SEQUENCE_IDS = 2**20
"""Ids of sequences that live at the same time differ modulo this."""


class Lifecycle:
    """All ``requests`` that have not ended, and their ``sequences`` by id. The planner decides which of them run."""

    def __init__(self, config: CoreConfig, planner: Planner, delivery: Delivery, out: list[Output]) -> None:
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self._config = config
        self._planner = planner
        self._delivery = delivery
        self._out = out
        self.held = HOLD_NONE
        """The mode in which an operator holds the work; it may reject new requests other than jobs."""
        self._recent: dict[tuple[str, str], None] = {}
        self._order_policy = Order(config.priorities, config.priority_aging_s)
        self._num_ids = 0
        self._order = 0

    def hold(self, mode: str) -> None:
        """An operator holds the work, or lets it go."""
        self.held = mode

    # -- beginning ----------------------------------------------------------------------------------------------------
    def submit(self, message: TokenizedRequest) -> None:
        """Accept a new request, or apply a repeat of a known one."""
        known = self._find(message.request_id)
        if known is not None:
            is_old = known.readers.of(message.attempt) is not None or (known.id, message.attempt) in self._recent
            if not is_old and self._delivery.move(known, message):
                self._announce_anew(known)
        elif (message.request_id, message.attempt) in self._recent:
            self._out.append(RequestOver(message.request_id))
        else:
            self._accept(message, {}, check_load=True)

    def readmit(
        self, message: TokenizedRequest, outputs: Mapping[int, SequenceOutput], others: Iterable[AlsoReads] = ()
    ) -> None:
        """Admit a request that an earlier scheduler had accepted, with the recovered output of its choices and its
        other readers."""
        if (message.request_id, message.attempt) in self._recent:
            self._out.append(RequestOver(message.request_id))
        else:
            self._accept(message, outputs, others, check_load=False)

    def _find(self, request_id: str) -> Request | None:
        return self.requests.get(request_id) or self._delivery.finished.get(request_id)

    def _accept(
        self,
        message: TokenizedRequest,
        outputs: Mapping[int, SequenceOutput],
        others: Iterable[AlsoReads] = (),
        *,
        check_load: bool,
    ) -> None:
        config, planner = self._config, self._planner
        request = make_request(message, config.eos_token_ids, self._order_policy, others)
        refused = validation.of_message(message, config.vocab_size) or self._misfit(request)
        if refused is None and check_load and self.held in (HOLD_WAIT, HOLD_ABORT) and request.priority_class != JOB:
            refused = validation.of_hold(request)
        if refused is None and check_load and planner.num_queued_requests >= config.max_num_queued_requests:
            refused = validation.of_load(request, config.max_num_queued_requests)
        if refused is not None:
            self._fail(request, refused)
            self._forget(request)
            return
        self.requests[request.id] = request
        planner.enqueue(request)
        hashes = prompt_hashes(message, config.block_size) if config.enable_prefix_caching else []
        if request.sampling.beam_width:
            leader = self._add_sequence(request, 0, hashes)
            group = new_group(leader, self._new_id)
            leader.search_with(group)
            self.sequences.update(dict.fromkeys(group.ids + group.choice_ids, leader))
            return  # a search that another scheduler began is begun again
        for choice_index in range(request.sampling.n):
            self._add_sequence(request, choice_index, hashes, outputs.get(choice_index))
        ended = [sequence for sequence in request.sequences if sequence.end != END_NONE]
        for sequence in ended:
            self.end(sequence)
        if ended:
            self._announce_anew(request)

    def _add_sequence(
        self, request: Request, choice_index: int, hashes: list[bytes], known: SequenceOutput | None = None
    ) -> Sequence:
        """Add one choice, with its recovered output if there is any."""
        self._order += 1
        output = known or SequenceOutput()
        shares = len(request.prompt) >= self._config.block_size or request.sampling.returns_prompt
        sequence = Sequence(
            id=self._new_id(),
            request=request,
            choice_index=choice_index,
            seed=seed_of(request.id, request.sampling, choice_index),
            order=self._order,
            limit=self._limit(request),
            tokens=request.prompt + output.tokens,
            hashes=list(hashes),
            leader=request.sequences[0] if choice_index and shares else None,
            produced=bool(output.tokens),
            scores=output.scores,
            scores_again=known is not None,
            end=output.end,
        )
        request.sequences.append(sequence)
        self._enlist(sequence)
        return sequence

    def _enlist(self, sequence: Sequence) -> None:
        sequence.request.sequence_begins()
        self.sequences[sequence.id] = sequence
        self._planner.waiting.add(sequence)

    def _limit(self, request: Request) -> int:
        max_tokens = request.sampling.max_tokens
        return len(request.prompt) + (UNLIMITED_TOKENS if max_tokens is None else max_tokens)

    def _new_id(self) -> int:
        """An unused id >= 1: 11 bits of the epoch and 20 bits of a counter that wraps."""
        while True:
            self._num_ids = self._num_ids % (SEQUENCE_IDS - 1) + 1
            sequence_id = self._config.epoch % 2047 * SEQUENCE_IDS + self._num_ids
            if sequence_id not in self.sequences:
                return sequence_id

    def _misfit(self, request: Request) -> RequestFailed | None:
        return validation.of_size(request, self._limit(request), self._planner.replicas.values())

    def refuse_misfits(self, digest: str = "") -> None:
        """Fail requests, or those with this adapter, that fit on no replica any more. Those that have run are spared:
        their replica may return."""
        requests = {each.request.id: each.request for each in self._planner.waiting}
        for request in [each for each in requests.values() if not digest or each.digest == digest]:
            refused = self._misfit(request) if request.queued else None
            if refused is not None:
                self._fail(request, refused)
                self.abort(request.id)

    # -- announcing anew ----------------------------------------------------------------------------------------------
    def lose_listener(self, detokenizer: str) -> None:
        """Announce everything that this detokenizer worked on to another one."""
        for request in self._all_requests():
            if request.detokenizer == detokenizer:
                self._announce_anew(request)

    def lose_ingress(self, ingress: str) -> None:
        """Mark the clients of an ingress as away."""
        for request in self._all_requests():
            reader = request.readers.at(ingress)
            if reader is None or reader.gone or self._delivery.part(request, reader, may_return=True):
                continue
            self._delivery.leave(request)

    def _all_requests(self) -> list[Request]:
        return [*self.requests.values(), *self._delivery.finished.values()]

    def _announce_anew(self, request: Request) -> None:
        """Have the request's text produced again from the first token."""
        self._delivery.silence(request, again=True)
        if request.sampling.scores_prompt:
            self._score_again(request)
        for sequence in request.sequences:
            self._planner.interrupt(sequence)

    def _score_again(self, request: Request) -> None:
        """Recompute the request's prompt scores, which may be lost, with its first sequence; from the prompt on if it
        has ended."""
        first = request.sequences[0]
        first.score_again()
        if first.state is not State.ENDED:
            return
        if self._delivery.revive(request):
            self.requests[request.id] = request
            self._planner.enqueue(request)
        first.begin_again(self._new_id(), self._limit(request), self._config.block_size)
        first.become(State.WAITING)
        self._enlist(first)

    # -- ending -------------------------------------------------------------------------------------------------------
    def keep_scores(self, result: StepResult) -> None:
        """Store log probabilities of a result, for repeated announcements."""
        ids, indexes = result.sequence_ids, result.token_indexes
        for score in row_scores(result):
            sequence = self.sequences.get(int(ids[score.row]))
            if sequence is not None and sequence.beam_group is None and indexes[score.row] == len(sequence.scores):
                sequence.scores.add(score)

    def stop(self, message: StopSequence, done_s: float) -> None:
        """End a sequence at a stop string, which was in a token of a step done at ``done_s`` or before."""
        sequence = self.sequences.get(message.sequence_id)
        if sequence is not None and sequence.beam_group is None and sequence.request.id == message.request_id:
            sequence.request.got_end(done_s)
            self.end(sequence)

    def leave(self, message: AbortRequest) -> None:
        """Remove a client that has left, unless it has returned since. Without a remaining client the request ends."""
        request = self._find(message.request_id)
        reader = None if request is None else request.readers.of(message.attempt)
        if request is None or reader is None:
            self._remember(message.request_id, message.attempt)
        elif self._delivery.part(request, reader, may_return=message.may_return):
            return
        elif message.may_return or request.readers.awaited:
            self._delivery.leave(request)
        else:
            self.abort(request.id)

    def cancel(self, request_id: str, *, held: bool = False) -> None:
        """End a request with an error to its waiting client. ``held``: the error invites a retry."""
        request = self.requests.get(request_id)
        if request is not None:
            self._fail(request, validation.of_hold(request) if held else validation.of_operator(request))
            self.abort(request_id)

    def give_up(self, request: Request) -> None:
        """Fail a request whose executors were lost repeatedly."""
        self._out.append(RequestGivenUp(request.id, "executors end computing it"))
        self._fail(request, validation.of_losses(request))
        self.abort(request.id)

    def fail_adapter(self, digest: str, error: str) -> None:
        """Fail the requests that wait for an adapter which cannot be read."""
        for request in [each for each in self.requests.values() if each.digest == digest]:
            if any(sequence.is_queued for sequence in request.sequences):
                self._fail(request, validation.of_adapter(request, error))
                self.abort(request.id)

    def abort(self, request_id: str) -> None:
        """End a request that has no reader any more."""
        request = self._find(request_id)
        assert request is not None
        request.abort()
        self._delivery.silence(request)
        self._settle(request)

    def settle(self, request_id: str, attempt: str, done_s: float) -> None:
        """A client has received everything; the last one settles the request. The request may still be running here, if
        results or the news of a stop string are under way (its last token is of a step done at ``done_s`` or before),
        or the client was served by an earlier scheduler."""
        request = self._find(request_id)
        reader = None if request is None else request.readers.of(attempt)
        if request is None or reader is None or self._delivery.part(request, reader):
            return
        if request.readers.awaited:
            self._delivery.leave(request)
        else:
            self._delivery.silence(request, delivered=True)
            if request.num_live and request.first_token_s:
                request.got_end(done_s)
            self._settle(request)

    def _settle(self, request: Request) -> None:
        request.settle()
        if not request.num_live:
            self._forget(request)
        for sequence in request.sequences:
            if sequence.state is not State.ENDED:
                self.end(sequence)

    def finish(self, sequence: Sequence, end: int, done_s: float) -> None:
        """End a sequence whose tokens ended it with code ``end``, in a step done at ``done_s``."""
        sequence.end_by(end)
        sequence.request.got_end(done_s)
        self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """Free everything that a sequence holds. With its last sequence the request ends, and is kept until
        delivered."""
        request, group = sequence.request, sequence.beam_group
        self._planner.withdraw(sequence)
        for sequence_id in (sequence.id, *(() if group is None else group.ids + group.choice_ids)):
            del self.sequences[sequence_id]
        request.sequence_ends()
        if not sequence.started and not request.settled:
            self._delivery.announce(request)
        if request.num_live:
            return
        del self.requests[request.id]
        self._planner.dismiss(request)
        if request.settled:
            self._forget(request)
            return
        self._delivery.keep(request)
        if sequence.scores_again and not sequence.started and not request.away and request.sampling.scores_prompt:
            self._score_again(request)  # its last token arrived after its detokenizer was lost

    def _fail(self, request: Request, failure: RequestFailed) -> None:
        self._out += [ToIngress(ingress, failure) for ingress in request.readers.ingresses]
        what = {"request_id": failure.request_id, "status": failure.status, "reason": failure.message}
        self._out.append(Note("request failed", what))

    def _forget(self, request: Request) -> None:
        """Drop the request, remembering only its attempts."""
        request.close()
        for attempt in request.readers.attempts:
            self._remember(request.id, attempt)
        self._delivery.over(request)

    def _remember(self, request_id: str, attempt: str) -> None:
        self._recent.pop((request_id, attempt), None)
        self._recent[request_id, attempt] = None
        if len(self._recent) > RECENT_REQUESTS:
            del self._recent[next(iter(self._recent))]

    def check_integrity(self) -> None:
        """Requests and sequences agree, and every live sequence is in exactly one place.

        Raises:
            AssertionError: it is not so.
        """
        planner = self._planner
        heads = {sequence.id for sequence in self.sequences.values()}
        places = [each.id for each in planner.placed() if each is each.head]
        assert sorted(places) == sorted(heads), "a sequence is nowhere, or in two places"
        living = [each for request in self.requests.values() for each in request.sequences]
        living = [each for each in living if each.state is not State.ENDED]
        assert sorted(each.id for each in living) == sorted(heads), "requests and sequences differ"
        for request in self.requests.values():
            states = [each.state for each in request.sequences]
            assert request.num_live == len(states) - states.count(State.ENDED) > 0, f"request {request.id} is over"
        assert planner.num_queued_requests == sum(request.queued for request in self.requests.values())
        assert len(self._recent) <= RECENT_REQUESTS
