"""The state of a call (one HTTP request), its open requests (one per prompt) and their choices (n per prompt).

The reader of the mailbox adds text to choices; the handler of the call takes what is new since its last turn. If the
handler is behind, the deltas of a choice are joined into one. No queue can therefore grow per client: a choice holds at
most the text that its ``max_tokens`` allow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pagebus.bus.messages import GenerateRequest, ReplyBatch
from pagebus.web.calls.answer_details import AnswerDetails, PromptInfo, TokenTexts
from pagebus.web.calls.output import ArrivedOutput
from pagebus.web.calls.parsing.output import OutputParser
from pagebus.web.http.errors import ApiError
from pagebus.web.http.naming import FieldNames

COUNTED_ELSEWHERE = 2**31
"""Counted tokens of calls other than the newest one that reads a request, so that metrics count each token once."""
SILENT_S = 20.0
"""A request is retried when nothing of it has arrived for so long; then after twice that time, and so on. A scheduler
keeps finished requests for longer."""


@dataclass(slots=True, eq=False)
class Choice(ArrivedOutput):
    """One output of a call, of this ``request``."""

    request: OpenRequest = field(kw_only=True)
    changed: bool = False
    """Since the last hand-out, when it had ``num_handed`` tokens."""
    num_handed: int = 0
    num_counted: int = 0
    """Tokens counted in metrics: those that have arrived, and those that a returning client had before."""

    def count_from(self, num_tokens: int) -> None:
        """Have metrics count the tokens behind the first ``num_tokens``, unless they count even fewer."""
        self.num_counted = max(self.num_counted, num_tokens)


class LoggedChoice(Choice):
    """A choice that also keeps its whole output, for the request log."""

    __slots__ = ("said",)

    def __init__(self, index: int, request: OpenRequest) -> None:
        super().__init__(index, request=request)
        self.said: list[str] = []

    def add_text(self, text: str, offset: int, num_tokens: int) -> None:
        known = self.num_chars
        super().add_text(text, offset, num_tokens)
        if self.num_chars > known:
            self.said.append(self.texts[-1])


@dataclass(slots=True, eq=False)
class PromptQueue:
    """Queued prompts of one client's calls that have several prompts (:mod:`pagebus.web.ingress.fanout`). ``name``:
    client and priority."""

    name: tuple[str, int]
    num_ahead: int = 0
    """Prompts that were sent and have no reply yet."""
    waiting: deque[deque[OpenRequest]] = field(default_factory=deque)
    """Prompts not yet sent, call by call."""

    def add(self, requests: Sequence[OpenRequest]) -> None:
        """Have the prompts of a call wait."""
        for request in requests:
            request.wait_in(self)
        self.waiting.append(deque(requests))

    def next(self) -> OpenRequest | None:
        """The next prompt to be sent, which counts as sent; None: its call is closed. Calls take turns."""
        call = self.waiting.popleft()
        request = call.popleft()
        if call:
            self.waiting.append(call)
        if request.queue is None:
            return None
        self.num_ahead += 1
        return request

    def replied(self) -> None:
        """A prompt that was sent has a reply, or is over."""
        self.num_ahead -= 1


class OpenRequest:
    """One prompt under way; times are of the monotonic clock."""

    __slots__ = (
        "attempt",
        "call",
        "choices",
        "finished_s",
        "first_token_seen",
        "held_batches",
        "is_sent",
        "message",
        "names",
        "needs_prompt",
        "num_bytes",
        "num_cached_tokens",
        "num_prompt_tokens",
        "num_unfinished",
        "patience_s",
        "peers",
        "prompt",
        "prompt_text",
        "queue",
        "request_id",
        "requested_s",
        "started_s",
        "tokens_only",
        "tokens_seen",
    )

    def __init__(
        self, request_id: str, attempt: str, call: Call, first_index: int, n: int, now_s: float, choice: type[Choice]
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.call = call
        self.choices = [choice(first_index + i, request=self) for i in range(n)]
        self.num_unfinished = n
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.first_token_seen = False
        self.started_s = now_s
        self.requested_s, self.tokens_seen, self.patience_s = now_s, 0, SILENT_S
        """When it was sent, or when the last check found new tokens; the number of tokens then; how long it may be
        silent from then on."""
        self.finished_s = 0.0
        """When the last text arrived; 0: it has not."""
        self.tokens_only = False
        """Whether details of the prompt are the whole answer."""
        self.needs_prompt = False
        """Whether the answer shows details of the prompt, which must arrive before any choice ends."""
        self.prompt: PromptInfo | None = None
        self.held_batches: list[ReplyBatch] = []
        """Batches with ends of choices that wait for the prompt."""
        self.message: GenerateRequest | None = None
        """The message on the bus."""
        self.num_bytes = 0
        """Approximate size of the message."""
        self.is_sent = True
        """Whether it has been sent; if not, other prompts of its call come first."""
        self.queue: PromptQueue | None = None
        """The queue that counts it until its first reply, if its call has several prompts."""
        self.peers: list[OpenRequest] = []
        """All open requests, past and present, that read the same replies, if there are several."""
        self.prompt_text: str | None = None
        """The prompt as the client sent it, if that was text."""
        self.names: FieldNames = ()
        """What fields are called in the client's body, where failures have other names."""

    def carry(self, message: GenerateRequest, num_bytes: int, names: FieldNames = ()) -> None:
        """It is sent as this message, of about ``num_bytes``. ``names``: what the client has called its fields."""
        self.message, self.num_bytes, self.names = message, num_bytes, names
        self.needs_prompt, self.tokens_only = message.sampling.returns_prompt, message.tokens_only

    # -- its turn among others of its call -----------------------------------------------------------------------------

    def wait_in(self, queue: PromptQueue) -> None:
        """It is to be sent when the queue has room for it."""
        self.queue, self.is_sent = queue, False

    def leave_queue(self) -> PromptQueue | None:
        """The queue that has counted it, and counts it no longer."""
        queue, self.queue = self.queue, None
        return queue

    def mark_sent(self) -> None:
        """It is on its way."""
        self.is_sent = True

    # -- the calls that read it ----------------------------------------------------------------------------------------

    @property
    def is_read_by_all(self) -> bool:
        """Whether no other open call reads it."""
        return all(each.call.closed or each is self for each in self.peers)

    def read_with(self, other: OpenRequest) -> None:
        """Read the same replies as ``other`` and its readers. They are asked for anew, by the message of this one, and
        metrics count its tokens in place of the other's."""
        self.peers = other.peers or [other]
        for each in self.peers:
            each.attempt, each.message = self.attempt, self.message
        self.peers.append(self)
        other.peers = self.peers
        for old, new in zip(other.choices, self.choices, strict=True):
            new.num_counted, old.num_counted = old.num_counted, COUNTED_ELSEWHERE

    def count_here(self) -> None:
        """Have metrics count what comes from now on."""
        for choice in self.choices:
            choice.num_counted = choice.num_tokens

    # -- what arrives --------------------------------------------------------------------------------------------------

    def show_prompt(self, prompt: PromptInfo) -> None:
        """The details of its prompt have arrived."""
        self.prompt = prompt
        if self.tokens_only:
            self.num_unfinished = 0
            self.choices[0].end("stop")

    def show_prompt_text(self, text: str | None) -> None:
        """Keep the prompt as the client has sent it."""
        self.prompt_text = text

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Keep the number of its prompt's tokens, and of those that were cached."""
        self.num_prompt_tokens, self.num_cached_tokens = num_tokens, num_cached

    def choice_ended(self, now_s: float) -> bool:
        """One of its choices has ended; returns whether it was the last."""
        self.num_unfinished -= 1
        if self.num_unfinished == 0:
            self.finished_s = now_s
        return self.num_unfinished == 0

    def sent_at(self, now_s: float) -> None:
        """Count silence from now on."""
        self.requested_s = now_s

    def be_patient(self) -> None:
        """Wait longer the next time. It may only take long, and would be interrupted by each retry."""
        self.patience_s *= 2

    def is_silent(self, now_s: float) -> bool:
        """Whether no token has arrived for so long that it may be lost."""
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        if num_tokens != self.tokens_seen:
            self.requested_s, self.tokens_seen, self.patience_s = now_s, num_tokens, SILENT_S
        return now_s - self.requested_s >= self.patience_s

    def retry(self, now_s: float, attempt: str) -> GenerateRequest:
        """The message of a new attempt."""
        assert self.message is not None
        self.attempt, self.requested_s = attempt, now_s
        self.message = replace(self.message, attempt=attempt)
        return self.message

    @property
    def num_created_cache_tokens(self) -> int:
        """Prompt tokens that were computed and are cached from now on: those of full blocks."""
        size = self.call.cache_block_size
        return max(0, self.num_prompt_tokens // size * size - self.num_cached_tokens) if size else 0

    @property
    def shows_output(self) -> bool:
        """Whether the client sees output tokens: no, if it only asks for details of its prompt."""
        details = self.call.details
        return details is None or not details.prompt_only

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the client sees."""
        return sum(choice.num_tokens for choice in self.choices) if self.shows_output else 0


class Call:
    """The choices of all prompts, in the client's order: prompt by prompt, n choices each."""

    def __init__(
        self,
        request_ids: Sequence[str],
        n: int,
        *,
        streaming: bool,
        now_s: float,
        attempt: str = "",
        choice: type[Choice] = Choice,
        cache_block_size: int = 0,
    ) -> None:
        """``cache_block_size``: tokens of a block of the prefix cache; 0: there is none."""
        self.requests = [
            OpenRequest(request_id, attempt, self, i * n, n, now_s, choice) for i, request_id in enumerate(request_ids)
        ]
        self.choices = [choice for request in self.requests for choice in request.choices]
        self.public_id = request_ids[0]
        """The id of its answer."""
        self.closed = False
        """Whether its handler, or the code that stands in for it, is done with it."""
        self.failure: ApiError | None = None
        self.interval = 1
        """Number of tokens of a choice that are handed out together."""
        self.cache_block_size = cache_block_size
        self.texts = TokenTexts()
        self.details: AnswerDetails | None = None
        """Details of the answer besides text."""
        self.tells_times = False
        """Whether the answer includes timings."""
        self.resumable = bool(attempt)
        """Whether the client may reconnect for the rest."""
        self._num_unfinished = len(self.choices)
        self._streaming = streaming
        self._changed: list[Choice] = []
        self._due = False
        """Whether the changes are to be handed out now."""
        self._waiter: asyncio.Future[None] | None = None

    def answer_as(self, public_id: str, *, interval: int, tells_times: bool) -> None:
        """Set the id of the answer, the tokens that are handed out together, and whether it includes timings."""
        self.public_id, self.interval, self.tells_times = public_id, interval, tells_times

    def close(self) -> None:
        """Its handler is done with it."""
        self.closed = True

    def show(self, details: AnswerDetails | None) -> None:
        """Set the details of the answer, and begin to parse the outputs if they ask for it."""
        self.details = details
        if details is not None and details.parsing is not None:
            for choice in self.choices:
                choice.parse_by(OutputParser(details.parsing, f"{choice.request.request_id}/{choice.index}"))

    @property
    def done(self) -> bool:
        """Every choice has finished."""
        return self._num_unfinished == 0

    # -- the mailbox's side -------------------------------------------------------------------------------------------

    def mark_changed(self, choice: Choice) -> None:
        """Note that ``choice`` has changed."""
        if choice.finish_reason is not None:
            self._num_unfinished -= 1
        if self._streaming:
            if not choice.changed:
                choice.changed = True
                self._changed.append(choice)
            self._due = self._due or self.interval == 1 or self._is_due(choice)
        if self._due or self._num_unfinished == 0:
            self._wake()

    def _is_due(self, choice: Choice) -> bool:
        """Whether a choice has a full interval of new tokens, its first ones, or its end."""
        new = choice.num_tokens - choice.num_handed
        return new >= self.interval or not choice.num_handed or choice.finish_reason is not None

    def fail(self, error: ApiError) -> None:
        """End the call with ``error``; only the first error counts."""
        if self.failure is None and not self.done:
            self.failure = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the handler's side -------------------------------------------------------------------------------------------

    async def changes(self) -> list[Choice]:
        """Wait for changes. Returns the choices that have changed, the oldest change first.

        Raises:
            ApiError: the call has failed (what came before it is handed out first).
        """
        while not self._due:
            if self.failure is not None:
                if self._changed:
                    break
                raise self.failure
            if self.done:
                return []
            await self._wait()
        changed, self._changed, self._due = self._changed, [], False
        for choice in changed:
            choice.changed, choice.num_handed = False, choice.num_tokens
        return changed

    async def finished(self) -> None:
        """Wait for the end.

        Raises:
            ApiError: the call has failed.
        """
        while not self.done:
            if self.failure is not None:
                raise self.failure
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
