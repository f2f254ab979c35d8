"""Delivery of a request's output, and retention until clients have received it.

A request is kept until its client has all of it. Its text is a pure function of its tokens: a detokenizer builds the
text from the first token of the announcement, and the ingress drops what its client already has. So one remedy covers
every failure on the way out, whether a detokenizer or an ingress dies or a client reconnects elsewhere: the sequence is
announced again with all of its tokens so far.

The announcement must contain all tokens. One whose result arrives between the announcement and the reading of it would
be lost. So a running sequence is first taken off its replica; it finds its blocks again in the cache. It is announced
when it enters a batch, as at its first start, so the announcement precedes every step that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from hashlib import blake2b

from pagebus.actors.scheduler.core import announcements
from pagebus.actors.scheduler.events import Output, RequestOver, ToDetokenizer, ToIngress, ToJournal
from pagebus.actors.scheduler.readers import Reader
from pagebus.actors.scheduler.request import Request, Sequence
from pagebus.actors.scheduler.states import State
from pagebus.bus.messages import RequestFailed, TokenizedRequest

SILENT_S = 30.0
"""Least time that a fully announced request is kept for an ingress that does not confirm it, in seconds."""


class Delivery:
    """The live detokenizers, the requests that have ended but are not delivered, and those whose client is away.

    Args:
        emit: receives outputs of the core.
        keep_s: how long a request waits for its client to return, in seconds.
    """

    def __init__(self, emit: Callable[[Output], None], keep_s: float) -> None:
        self.detokenizers: tuple[str, ...] = ()
        self.finished: dict[str, Request] = {}
        self._emit = emit
        self._keep_s = keep_s
        self._unannounced: dict[str, Request] = {}
        self._deadlines: dict[str, float] = {}
        self._undated: list[str] = []
        """Requests whose deadline is set at the next :meth:`expired`."""
        self._next_s = math.inf
        """A lower bound of all deadlines."""

    def use(self, detokenizers: Iterable[str]) -> None:
        """These detokenizers are live."""
        self.detokenizers = tuple(sorted(detokenizers))

    # -- announcing ---------------------------------------------------------------------------------------------------
    def start(self, sequence: Sequence) -> None:
        """Announce a sequence and its output so far to the request's detokenizer. Not if all clients are away, nor for
        a beam search before its end."""
        request = sequence.request
        request.found_cached(sequence.num_cached)
        if sequence.started or request.away or (sequence.beam_group is not None and sequence.state is not State.ENDED):
            return
        detokenizer = request.detokenizer
        if detokenizer is None:
            digest = blake2b(request.id.encode("utf-8", "surrogatepass"), digest_size=4).digest()
            detokenizer = self.detokenizers[int.from_bytes(digest, "little") % len(self.detokenizers)]
            request.deliver_by(detokenizer)
        sequence.announce()
        for message in announcements.started(sequence):
            self._emit(ToDetokenizer(detokenizer, message))

    def announce(self, request: Request) -> None:
        """Note that a sequence of the request ended before it could be announced (again)."""
        self._unannounced[request.id] = request

    def announce_ended(self) -> None:
        """Announce ended sequences where that is due. Running ones are announced when they enter a batch."""
        if not self._unannounced or not self.detokenizers:
            return
        requests, self._unannounced = self._unannounced, {}
        for request in requests.values():
            if request.sampling.returns_prompt and not _has_begun(request.sequences[0]):
                self._unannounced[request.id] = request  # the first choice carries the prompt, which precedes any end
                continue
            for sequence in request.sequences:
                if sequence.state is State.ENDED:
                    self.start(sequence)
            if request.id in self.finished and not request.away:
                self._wait(request)  # only now can its client get it

    def silence(self, request: Request, *, again: bool = False, delivered: bool = False) -> None:
        """Stop work on the request's text. ``again``: until its next announcement, which is due. ``delivered``: the
        clients have everything.

        Unless it is delivered, ended sequences are voided too. A detokenizer that is behind might otherwise still send
        their end and take the next announcement for a repeat. It might also never see the end, if the bus has lost it.
        """
        for sequence in request.sequences:
            has_its_end = delivered and sequence.state is State.ENDED
            if sequence.started and request.detokenizer is not None and not has_its_end:
                for message in announcements.void(sequence):
                    self._emit(ToDetokenizer(request.detokenizer, message))
            sequence.silence()
        request.deliver_by(None)
        if again:
            self._unannounced[request.id] = request
        else:
            self._unannounced.pop(request.id, None)

    # -- clients ------------------------------------------------------------------------------------------------------
    def part(self, request: Request, reader: Reader, *, may_return: bool = False) -> bool:
        """Remove one reader. Returns whether others still read; for them the request continues unchanged."""
        was_there = not reader.gone
        others = request.readers.part(reader, may_return=may_return)
        if others and was_there:
            self._emit(ToJournal(announcements.moved(request)))
        return others

    def leave(self, request: Request) -> None:
        """Mark all clients as away. If none returns in time, :meth:`expired` names the request."""
        self.silence(request)
        request.client_left()
        self._wait(request)

    def move(self, request: Request, message: TokenizedRequest) -> bool:
        """Handle a repeated request, perhaps from another ingress. Returns whether the request must be announced again.

        It returns False for an outdated attempt that was delayed, and False with an error to the client if its content
        differs from the request's. A shared request is announced to all its readers; otherwise the new reader replaces
        the others, which are told to ask again.
        """
        if self._is_outdated(request, message):
            return False
        if message.sampling != request.sampling or message.prompt_token_ids.tobytes() != request.prompt.tobytes():
            conflict = RequestFailed(
                request_id=request.id,
                status=422,
                error_type="invalid_request_error",
                message="A request with this idempotency key is under way, and it is not the same as this one.",
            )
            self._emit(ToIngress(message.ingress, conflict))
            return False
        reader = Reader(message.ingress, message.attempt, message.asked)
        if message.shared:
            request.readers.join(reader)
            request.trace(traced=request.traced or message.traced)
        else:
            for each in request.readers:
                self._turn_away(request.id, each.ingress, each.attempt, stays=message.ingress)
            request.readers.replace(reader)
            request.trace(traced=message.traced)
        request.client_came()
        if request.id not in self.finished:
            self._deadlines.pop(request.id, None)
        self._emit(ToJournal(announcements.moved(request)))
        return True

    def _is_outdated(self, request: Request, message: TokenizedRequest) -> bool:
        """Whether this ingress, or for an unshared request any reader, has made a later attempt."""
        if message.shared:
            here = request.readers.at(message.ingress)
            return here is not None and message.asked < here.asked
        if message.asked >= request.readers.asked:
            return False
        self._turn_away(request.id, message.ingress, message.attempt, stays=request.readers.newest.ingress)
        return True

    def _turn_away(self, request_id: str, ingress: str, attempt: str, *, stays: str) -> None:
        """Fail an attempt whose replies go to the ingress ``stays`` instead; nothing is sent if both are the same."""
        if ingress != stays:
            text = "The request was asked for elsewhere. Ask again."
            failure = RequestFailed(
                request_id=request_id, status=503, error_type="server_error", message=text, attempt=attempt
            )
            self._emit(ToIngress(ingress, failure))

    # -- ends ---------------------------------------------------------------------------------------------------------
    def keep(self, request: Request) -> None:
        """Keep a request whose sequences have all ended until its client has everything."""
        self.finished[request.id] = request
        self._wait(request)

    def revive(self, request: Request) -> bool:
        """Mark a finished request as running again; returns whether it had finished."""
        self._deadlines.pop(request.id, None)
        return self.finished.pop(request.id, None) is not None

    def over(self, request: Request) -> None:
        """Forget the request."""
        self.finished.pop(request.id, None)
        self._unannounced.pop(request.id, None)
        self._deadlines.pop(request.id, None)
        self._emit(RequestOver(request.id, request))

    @property
    def is_waiting(self) -> bool:
        """Whether :meth:`expired` must be called from time to time."""
        return bool(self._deadlines)

    def _wait(self, request: Request) -> None:
        """Start the time in which the client must return, or confirm that it has everything."""
        self._deadlines[request.id] = math.inf
        self._undated.append(request.id)

    def expired(self, now_s: float) -> list[str]:
        """Requests whose clients did not return or confirm in time, each named once. It is called at every step, so
        requests are examined only when the first may be due."""
        for request_id in self._undated:
            if request_id in self._deadlines:
                present = request_id in self.finished and not self.finished[request_id].away
                deadline_s = now_s + (max(self._keep_s, SILENT_S) if present else self._keep_s)
                self._deadlines[request_id], self._next_s = deadline_s, min(self._next_s, deadline_s)
        self._undated.clear()
        if now_s < self._next_s:
            return []
        undelivered = {each.id for each in self._unannounced.values() if not each.away}
        due = [each for each, deadline_s in self._deadlines.items() if deadline_s <= now_s and each not in undelivered]
        for request_id in due:
            del self._deadlines[request_id]
        self._next_s = min(self._deadlines.values(), default=math.inf)
        return due

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Finished requests have no live sequences, and requests whose clients are away are not announced.

        Raises:
            AssertionError: it is not so.
        """
        requests = [*running, *self.finished.values()]
        assert len({request.id for request in requests}) == len(requests), "a request runs and has finished"
        for request in self.finished.values():
            assert request.num_live == 0, f"finished request {request.id} runs"
        for request in requests:
            assert not (request.away and any(each.started for each in request.sequences)), f"{request.id} is away"
            assert not (request.away and any(request.readers)), f"{request.id} is away, and is read"
        assert self._deadlines.keys() <= {request.id for request in requests}, "a deadline of a request that is over"
        assert self._unannounced.keys() <= {request.id for request in requests}


def _has_begun(sequence: Sequence) -> bool:
    """Whether a sequence is announced, or can be announced at once."""
    return sequence.started or sequence.state is State.ENDED
