"""Who gets a request's output, and what is kept until they have it.

A request is kept until its client has all of it. Its text is a pure function of its tokens: a detokenizer that is told
of a sequence makes the text from the first token on, and the ingress drops what its client has. So whatever breaks on
the way out (a detokenizer or an ingress dies, a client comes back elsewhere), the remedy is the same: the sequence is
announced anew, with all tokens that it has by then.

That must be all there are: a token whose result comes between the announcement and the reading of it would be lost. So
a running sequence is taken off its replica first (it finds its blocks in the cache again), and is announced when it
enters a batch, as the first time: the announcement is older than any step that computes it.
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
"""How long a request that has been told to the end is kept, at least, for an ingress that says nothing about it."""


class Delivery:
    """The detokenizers, the requests that have ended but are not delivered yet, and those whose client is away.

    Args:
        emit: takes an output of the core.
        keep_s: how long a request waits for its client to come back.
    """

    def __init__(self, emit: Callable[[Output], None], keep_s: float) -> None:
        self.detokenizers: tuple[str, ...] = ()
        self.finished: dict[str, Request] = {}
        self._emit = emit
        self._keep_s = keep_s
        self._unannounced: dict[str, Request] = {}
        self._deadlines: dict[str, float] = {}
        self._undated: list[str] = []
        """Those of which the deadline is still to be set, as of the next :meth:`expired`."""
        self._next_s = math.inf
        """No deadline is earlier."""

    # -- announcing ---------------------------------------------------------------------------------------------------
    def start(self, sequence: Sequence) -> None:
        """Tell the request's detokenizer about a sequence and what it has produced so far, unless nobody listens, or
        nothing is certain before the end."""
        request = sequence.request
        if request.num_cached is None:
            request.num_cached = sequence.num_cached
        if sequence.started or request.away or (sequence.beam_group is not None and sequence.state is not State.ENDED):
            return
        if request.detokenizer is None:
            digest = blake2b(request.id.encode("utf-8", "surrogatepass"), digest_size=4).digest()
            request.detokenizer = self.detokenizers[int.from_bytes(digest, "little") % len(self.detokenizers)]
        sequence.started = True
        for message in announcements.started(sequence, request.num_cached):
            self._emit(ToDetokenizer(request.detokenizer, message))

    def announce(self, request: Request) -> None:
        """A sequence of the request has ended before it could be announced (again)."""
        self._unannounced[request.id] = request

    def announce_ended(self) -> None:
        """Announce again what has ended, wherever that is due. (What still runs is announced when it enters.)"""
        if not self._unannounced or not self.detokenizers:
            return
        requests, self._unannounced = self._unannounced, {}
        for request in requests.values():
            if request.sampling.returns_prompt and not _has_begun(request.sequences[0]):
                self._unannounced[request.id] = request  # the first choice tells the prompt, which comes before any end
                continue
            for sequence in request.sequences:
                if sequence.state is State.ENDED:
                    self.start(sequence)
            if request.id in self.finished and not request.away:
                self._wait(request)  # only now can its client get it

    def silence(self, request: Request, *, again: bool = False, over: bool = False) -> None:
        """Nobody is to work on the request's text any more; ``again``: until it is announced once more, which is due;
        ``over``: it never will be. Else what has ended has to be void, too: a detokenizer that is behind may be about
        to tell its end still, and would take what it is told later for a repeat."""
        for sequence in request.sequences:
            if sequence.started and request.detokenizer is not None and not (over and sequence.state is State.ENDED):
                for message in announcements.void(sequence):
                    self._emit(ToDetokenizer(request.detokenizer, message))
            sequence.started = False
        request.detokenizer = None
        if again:
            self._unannounced[request.id] = request
        else:
            self._unannounced.pop(request.id, None)

    # -- clients ------------------------------------------------------------------------------------------------------
    def part(self, request: Request, reader: Reader, *, may_return: bool = False) -> bool:
        """One of the clients reads no more. Whether others do: for them the request goes on as it is."""
        was_there = not reader.gone
        others = request.readers.part(reader, may_return=may_return)
        if others and was_there:
            self._emit(ToJournal(announcements.moved(request)))
        return others

    def leave(self, request: Request) -> None:
        """All clients are away. If none comes back in time, :meth:`expired` names the request."""
        self.silence(request)
        request.away = True
        self._wait(request)

    def move(self, request: Request, message: TokenizedRequest) -> bool:
        """A client asks for the request again, perhaps from another ingress. False if it has asked since, and this was
        held up on its way; false, and told so, if what it asks for is not the same; else the request has to be
        announced anew: to all that share it, or to this one alone. Should somebody still wait where it goes on no more,
        because it was the other one that was held up, he is told to ask again."""
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
            request.traced |= message.traced
        else:
            for each in request.readers:
                self._turn_away(request.id, each.ingress, each.attempt, stays=message.ingress)
            request.readers.replace(reader)
            request.traced = message.traced
        request.away = False
        if request.id not in self.finished:
            self._deadlines.pop(request.id, None)
        self._emit(ToJournal(announcements.moved(request)))
        return True

    def _is_outdated(self, request: Request, message: TokenizedRequest) -> bool:
        """Whether the ingress has asked since; or, where one alone reads, anybody."""
        if message.shared:
            here = request.readers.at(message.ingress)
            return here is not None and message.asked < here.asked
        if message.asked >= request.readers.asked:
            return False
        self._turn_away(request.id, message.ingress, message.attempt, stays=request.readers.newest.ingress)
        return True

    def _turn_away(self, request_id: str, ingress: str, attempt: str, *, stays: str) -> None:
        """An attempt comes to nothing: replies go to the ingress ``stays``, which knows if both are its own."""
        if ingress != stays:
            text = "The request was asked for elsewhere. Ask again."
            failure = RequestFailed(
                request_id=request_id, status=503, error_type="server_error", message=text, attempt=attempt
            )
            self._emit(ToIngress(ingress, failure))

    # -- ends ---------------------------------------------------------------------------------------------------------
    def keep(self, request: Request) -> None:
        """All of its sequences have ended: keep it until its client has everything."""
        self.finished[request.id] = request
        self._wait(request)

    def revive(self, request: Request) -> bool:
        """The request runs again; whether it had finished."""
        self._deadlines.pop(request.id, None)
        return self.finished.pop(request.id, None) is not None

    def over(self, request: Request) -> None:
        """Nothing is kept of the request any more."""
        self.finished.pop(request.id, None)
        self._unannounced.pop(request.id, None)
        self._deadlines.pop(request.id, None)
        self._emit(RequestOver(request.id, request))

    @property
    def is_waiting(self) -> bool:
        """Whether :meth:`expired` has to be asked now and then."""
        return bool(self._deadlines)

    def _wait(self, request: Request) -> None:
        """From now on its client has a while to come back, or to say that it has it all."""
        self._deadlines[request.id] = math.inf
        self._undated.append(request.id)

    def expired(self, now_s: float) -> list[str]:
        """Requests whose clients did not come back, or never said that they have it all. Each is named once. They are
        looked through only when the first may be due: this is asked at every step."""
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
        """What is finished has ended, and who is away is not talked to.

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
    """Whether a sequence is announced, or can be at once."""
    return sequence.started or sequence.state is State.ENDED
