"""Sends requests to the bus and delivers replies to the calls they belong to.

One task reads the mailbox ``replies:<ingress>``. It runs for every token of every stream, so a reply costs only a few
dictionary look-ups and list appends. Text that is generated again starts from its beginning; what has already arrived
is recognised by its position and dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pagebus.actors.runtime.actor import describe
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.contract import Bus, CodecError
from pagebus.bus.messages import (
    AbortCalls,
    AbortRequest,
    BlockState,
    CancelRequest,
    GenerateRequest,
    HoldState,
    Message,
    PromptReply,
    ReplyBatch,
    RequestFailed,
    RequestsDone,
    RequestTimed,
    SchedulerState,
)
from pagebus.bus.outbox import OUTBOX_LIMIT, Outbox
from pagebus.bus.streams import Names
from pagebus.web.calls.answer_details import read_prompt
from pagebus.web.calls.call import Call, Choice, LoggedChoice, OpenRequest
from pagebus.web.http.errors import ApiError, aborted, bus_away, from_failure, internal, unavailable
from pagebus.web.http.naming import FieldNames, rename
from pagebus.web.ingress.fanout import Fanout
from pagebus.web.ingress.mailbox import Mailbox
from pagebus.web.ingress.readers import Readers
from pagebus.web.ingress.reply_columns import NOT_BEFORE, columns_of, details_of
from pagebus.web.ingress.request_log import RequestLog
from pagebus.web.ingress.retries import Retries
from pagebus.web.observatory.scheduler_queries import SchedulerQueries
from pagebus.web.telemetry.metrics import IngressMetrics

if TYPE_CHECKING:
    from pagebus.web.telemetry.tracing import Tracing

HEAVY_BYTES = 2**16
"""Requests above this size wait for their turn separately from others."""
TURN_S = 0.005
"""Seconds of work on replies after which other tasks get a turn: answers with many logprobs take long to read."""


class Inbox:
    """Open requests by id, and the reader of their replies. ``tracing`` and ``request_log`` trace and log them, if set.
    ``heavy`` sends large requests, for which others do not wait; None: as all others. ``cache_block_size`` is that of
    the prefix cache, 0 if there is none. ``on_closed`` runs when a call is over. ``stage`` is that of dead letters."""

    def __init__(
        self,
        bus: Bus,
        names: Names,
        address: str,
        outbox: Outbox,
        metrics: IngressMetrics,
        log: Log,
        tracing: Tracing | None = None,
        request_log: RequestLog | None = None,
        heavy: Outbox | None = None,
        cache_block_size: int = 0,
        on_closed: Callable[[], None] = lambda: None,
        stage: str = "ingress",
    ) -> None:
        self._bus, self._stage = bus, stage
        self._names = names
        self._outbox = outbox
        self._heavy = heavy or outbox
        for each in (self._outbox, self._heavy):
            each.drop_unsendable(self._unsendable)
        self._metrics = metrics
        self._log = log
        self._tracing = tracing
        self._request_log = request_log
        self._cache_block_size = cache_block_size
        self._bus_retry = BusRetry(log, doing="replies wait")
        self.mailbox = Mailbox(bus, names.replies(address), log, lambda: self.retries.retry_all())
        self.queries = SchedulerQueries(outbox, names.control, address)
        self._readers = Readers()
        self._fanout = Fanout(self._send)
        self.retries = Retries(self._readers, self._send, outbox, log)
        self._on_closed = on_closed
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed_with: ApiError | None = None
        """What all calls have ended with, and later ones end with too."""

    # -- calls --------------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        """Requests (prompts) under way."""
        return len(self._readers.newest)

    def open_requests(self) -> list[OpenRequest]:
        """Open requests; of those that several calls read, only the newest."""
        return list(self._readers.newest.values())

    def submit(
        self, requests: Sequence[GenerateRequest], names: Sequence[FieldNames] = (),
        *, streaming: bool, num_bytes: int = 0,
    ) -> Call:  # fmt: skip
        """Send the requests of one call, each of about ``num_bytes``. ``names``: for each what fields are called in the
        body, where failures have other names. Every call is given back with :meth:`close`.

        Raises:
            ApiError: 503, too much waits to be sent. The second half of the outbox is kept for aborts. 422, something
                else is under way under the same name. That of :meth:`fail_all`, if it was called.
        """
        if self._closed_with is not None:
            raise self._closed_with
        for request in requests:
            self._readers.check_same(request)
        outbox = self._heavy if num_bytes > HEAVY_BYTES else self._outbox
        if outbox.depth + len(requests) > OUTBOX_LIMIT // 2:
            raise bus_away()
        n, ids = requests[0].sampling.n, [request.request_id for request in requests]
        attempt, kind = requests[0].attempt, LoggedChoice if self._is_logged(requests[0]) else Choice
        call = Call(
            ids, n, streaming=streaming, now_s=time.monotonic(), attempt=attempt, choice=kind,
            cache_block_size=self._cache_block_size,
        )  # fmt: skip
        for request, opened, known in zip(requests, call.requests, names or [()] * len(requests), strict=True):
            if self._request_log is not None:
                self._request_log.received(request)
            if self._tracing is not None and not request.tokens_only:
                request = self._tracing.begin(request, opened)
            opened.carry(request, num_bytes, known)
            self._readers.add(opened)
        self._fanout.submit(requests[0].client, requests[0].priority, call.requests)
        self._idle.clear()
        return call

    def _send(self, request: OpenRequest) -> None:
        """Send a request, for the first time or as another attempt."""
        assert request.message is not None
        request.sent_at(time.monotonic())
        outbox = self._heavy if request.num_bytes > HEAVY_BYTES else self._outbox
        outbox.publish(self._names.requests, request.message, num_bytes=request.num_bytes)

    def _is_logged(self, request: GenerateRequest) -> bool:
        """Whether outputs of the request are logged."""
        says = not (request.tokens_only or request.sampling.pooling)
        return says and self._request_log is not None and self._request_log.outputs

    def close(self, call: Call, *, delivered: bool) -> bool:
        """End a call for its handler. What still runs is aborted, once, and what has ended need not be kept any longer.
        If the client disconnected (not ``delivered``) and may return, the call goes on: true."""
        if call.closed:
            return False
        call.close()
        stays = call.resumable and not delivered
        running = [request for request in call.requests if self._readers.remove(request)]
        self._fanout.close(call.requests, goes_on=stays)
        for request in running:
            if not stays:
                self._metrics.aborted(request)
            if request.is_sent:
                abort = AbortRequest(request_id=request.request_id, attempt=request.attempt, may_return=stays)
                self._outbox.publish(self._names.control, abort)
        done = [request for request in call.requests if request.num_unfinished == 0 and request.is_read_by_all]
        if done and not stays:
            names, attempts = zip(*((each.request_id, each.attempt) for each in done), strict=True)
            self._outbox.publish(self._names.control, RequestsDone(request_ids=names, attempts=attempts))
        if self._tracing is not None:
            self._tracing.closed(call)
        if self._request_log is not None:
            self._request_log.ended(call)
        if running:
            event = "left running" if stays else "aborted"
            self._log.info(event, request_id=call.requests[0].request_id, requests=len(running))
        if not self._readers.newest:
            self._idle.set()
        self._on_closed()
        return stays and bool(running)

    def end(self, call: Call, error: ApiError) -> None:
        """Abort everything of the call that waits or runs; the call ends with ``error``."""
        call.fail(error)
        self.close(call, delivered=True)

    def abort(self, client: str, ids: Collection[str]) -> int:
        """End the calls of a client that have these ids of answers, or all of them if there are none; returns how many
        have ended."""
        own = {each.call for each in self._readers if each.message and each.message.client == client}
        ended = [call for call in own if not ids or call.public_id in ids]
        for call in ended:
            self.end(call, aborted())
        return len(ended)

    def abort_at(self, addresses: Iterable[str], client: str, ids: Sequence[str]) -> None:
        """Have other ingresses end calls in the same way."""
        for address in addresses:
            self._outbox.publish(self._names.replies(address), AbortCalls(client=client, ids=tuple(ids)))

    def cancel(self, request_id: str) -> None:
        """Have the scheduler end a request of any ingress; its client is told."""
        self._outbox.publish(self._names.control, CancelRequest(request_id=request_id))

    def fail_all(self, error: ApiError) -> None:
        """End every open call with ``error``, and every later one; their handlers abort what still runs."""
        self._closed_with = error
        for request in self._readers:
            request.call.fail(error)

    async def idle(self) -> None:
        """Wait until nothing is open."""
        await self._idle.wait()

    # -- replies ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read the mailbox until cancelled."""
        await self._bus_retry.for_ever(self._read)

    async def _read(self) -> None:
        entries = await self.mailbox.read()
        began_s = time.perf_counter()
        for entry in entries:
            if time.perf_counter() - began_s > TURN_S:
                await asyncio.sleep(0)
                began_s = time.perf_counter()
            problem = entry.error if entry.message is None else self._try(entry.message)
            if problem:
                self._log.error("reply dead-lettered", entry=str(entry.id), error=problem)
                put_aside = partial(self._bus.dead_letter, self._stage, entry, problem)
                await self._bus_retry.until_taken(put_aside, "letters")
        await asyncio.sleep(0)  # handlers write what has come, before more is read
        await self.mailbox.trim(idle=not self._readers.newest)
        self.retries.retry_silent()

    def _try(self, message: Message) -> str:
        """:meth:`deliver`; a malformed message fails only the requests it names."""
        try:
            return self.deliver(message)
        except Exception as error:
            for request_id in getattr(message, "request_ids", ()) or (getattr(message, "request_id", ""),):
                for request in self._readers.of(request_id):
                    self._fail(request, internal(), others_run=True)
            return describe(error)

    def deliver(self, message: Message) -> str:
        """Deliver one message to its calls; returns what is wrong with it, if anything."""
        if isinstance(message, ReplyBatch):
            return self._deliver_batch(message)
        if isinstance(message, RequestFailed):
            self._deliver_failure(message)
            return ""
        if isinstance(message, PromptReply):
            self._deliver_prompt(message)
            return ""
        if isinstance(message, SchedulerState | BlockState | HoldState):
            self.queries.answered(message)
            return ""
        if isinstance(message, AbortCalls):
            self.abort(message.client, frozenset(message.ids))
            return ""
        if isinstance(message, RequestTimed):
            if self._tracing is not None:
                self._tracing.timed(message)
            return ""
        return f"{type(message).__name__} is not a reply"

    def _deliver_batch(self, batch: ReplyBatch) -> str:
        for earlier in list(self._readers.earlier):
            self._deliver_rows(batch, earlier)
        return self._deliver_rows(batch, self._readers.newest)

    def _deliver_rows(self, batch: ReplyBatch, readers: Mapping[str, OpenRequest]) -> str:
        columns = columns_of(batch)
        if len({len(column) for column in columns}) != 1:
            return "columns of different lengths"
        now_s = time.monotonic()
        shown_tokens, lengths, predicted = details_of(batch)
        rows = zip(range(len(columns[0])), *columns, strict=True)
        for row, request_id, index, text, num_tokens, finish, stop, num_prompt, num_cached, offset in rows:
            request = readers.get(request_id)
            if request is None or not 0 <= index < len(request.choices):
                continue
            if request.queue is not None:
                self._fanout.on_reply(request)
            choice = request.choices[index]
            if choice.finish_reason is not None:
                continue
            new_tokens = num_tokens - choice.num_tokens
            if finish is None and new_tokens <= 0 and not choice.num_chars < offset + len(text) < NOT_BEFORE:
                continue
            if finish is not None or request.attempt:
                num_known = num_tokens - len(shown_tokens[row]) if row in shown_tokens else 0
                if self._is_passed_over(batch, choice, finish, offset, num_known):
                    continue
            if num_cached != request.num_cached_tokens or num_prompt != request.num_prompt_tokens:
                request.count_prompt(num_prompt, num_cached)
            self._metrics.tokens(choice, request, num_tokens, now_s)
            choice.add_text(text, offset, num_tokens)
            if row in predicted:
                choice.tell_predicted(predicted[row])
            if row in lengths:
                begin = offset if offset < NOT_BEFORE else choice.num_chars - len(text)
                choice.add_starts(lengths[row], begin, num_tokens)
            if row in shown_tokens and new_tokens > 0:
                request.call.texts.add(batch.token_texts, batch.token_bytes)
                choice.add_tokens(shown_tokens[row][-new_tokens:])
            if finish is not None:
                choice.end(finish, stop)
                self._choice_finished(choice, finish, num_tokens, now_s)
            request.call.mark_changed(choice)
        return ""

    def _is_passed_over(
        self, batch: ReplyBatch, choice: Choice, finish: str | None, offset: int, num_known: int
    ) -> bool:
        """Whether news of ``choice`` in ``batch`` is skipped; it begins at the character ``offset``, behind
        ``num_known`` tokens. It is skipped if it is not for this connection, arrives before the prompt, or its request
        has failed."""
        request = choice.request
        is_first = choice is request.choices[0]
        held_batches = finish is not None and request.needs_prompt and request.prompt is None
        gap = choice.num_chars < offset < NOT_BEFORE or choice.num_tokens < num_known
        if request.attempt and (gap or (held_batches and is_first)):
            return True  # for the previous connection, which had more: everything is sent again
        if finish in ("error", "abort"):
            self._fail(request, _ended_by(finish), others_run=request.num_unfinished > 1)
            return True
        if held_batches and not is_first:
            request.held_batches.append(
                batch
            )  # the first choice brings the prompt, and may be sent again after this one
        elif held_batches:
            self._log.error("a choice ended before its prompt was told", request_id=request.request_id)
            self._fail(request, internal(), others_run=request.num_unfinished > 1)
        return held_batches

    def _choice_finished(self, choice: Choice, finish: str, num_tokens: int, now_s: float) -> None:
        request = choice.request
        self._metrics.choice_finished(choice, finish, num_tokens)
        if request.choice_ended(now_s):
            self._metrics.request_finished(request, now_s)
            self._over(request)

    def _deliver_prompt(self, reply: PromptReply) -> None:
        for request in self._readers.of(reply.request_id):
            if request.prompt is not None:
                continue
            request.show_prompt(read_prompt(reply))
            request.call.texts.add(reply.token_texts, reply.token_bytes)
            if request.tokens_only:
                self._over(request)
                request.call.mark_changed(request.choices[0])
            while request.held_batches:
                self._deliver_rows(request.held_batches.pop(0), {request.request_id: request})

    def _deliver_failure(self, failure: RequestFailed) -> None:
        for request in self._readers.of(failure.request_id):
            if failure.attempt in ("", request.attempt):
                self._fail(request, rename(from_failure(failure), request.names))

    def _fail(self, request: OpenRequest, error: ApiError, *, others_run: bool = False) -> None:
        """The system has ended ``request`` (except for other choices that run); its call ends with ``error``."""
        if others_run:
            abort = AbortRequest(request_id=request.request_id, attempt=request.attempt, reason="a choice failed")
            self._outbox.publish(self._names.control, abort)
        self._over(request)
        self._metrics.failed(request)
        request.call.fail(error)

    def _unsendable(self, message: Message, error: CodecError) -> None:
        """The message cannot be encoded and should have been rejected earlier: a bug of ours that costs one request."""
        request_id = getattr(message, "request_id", "")
        self._log.error("message dropped", message=type(message).__name__, request_id=request_id, error=str(error))
        if isinstance(message, GenerateRequest):
            for request in self._readers.of(request_id):
                self._fail(request, internal())

    def _over(self, request: OpenRequest) -> None:
        """Forget a request that gets no more replies."""
        self._fanout.on_reply(request)
        self._readers.remove(request)
        if not self._readers.newest:
            self._idle.set()


def _ended_by(finish: str | None) -> ApiError:
    if finish == "abort":
        return unavailable("The request was ended by the server.")
    return internal("The request failed while it was computed.") if finish == "error" else internal()
