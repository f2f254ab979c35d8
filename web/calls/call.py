"""The state of a call (one HTTP request), its open requests (one per prompt) and their choices (n per prompt).

The reader of the mailbox adds text to choices; the handler of the call takes what is new since its last turn. If the
handler is behind, the deltas of a choice are joined into one. No queue can therefore grow per client: a choice holds at
most the text that its ``max_tokens`` allow.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pagebus.bus.messages import FinishReason, GenerateRequest, ReplyBatch
from pagebus.web.calls.answer_details import AnswerDetails, PromptInfo, Token, TokenTexts
from pagebus.web.calls.parsing.output import OutputParser
from pagebus.web.http.errors import ApiError
from pagebus.web.http.naming import FieldNames

SILENT_S = 20.0
"""A request is retried when nothing of it has arrived for so long; then after twice that time, and so on. A scheduler
keeps finished requests for longer."""


@dataclass(slots=True, eq=False)
class Choice:
    """One output. ``texts`` has arrived and was not taken yet. ``index`` is that of the answer."""

    index: int
    request: OpenRequest
    texts: list[str] = field(default_factory=list)
    num_chars: int = 0
    """Characters of text that have arrived, taken or not."""
    num_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    """Times of the first and last arrival of tokens; 0: none yet. ``first_tokens`` arrived first."""
    first_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    changed: bool = False
    tokens: list[Token] = field(default_factory=list)
    """Tokens that have arrived and were not taken yet, for calls whose answers show tokens."""
    cumulative_logprob: float = 0.0
    parser: OutputParser | None = None
    """Parses the text, if it may contain more than content."""
    num_counted: int = 0
    """Tokens counted in metrics: those that have arrived, and those that a returning client had before."""
    token_starts: array[int] = field(default_factory=lambda: array("i"))
    """The character at which each token begins, for calls that parse reasoning."""
    predicted: tuple[int, int] = (0, 0)
    """Tokens of the prediction that have occurred, and that have not."""
    num_handed: int = 0
    """Number of tokens at the last hand-out."""

    def add_text(self, text: str, offset: int) -> None:
        """Add text that begins at character ``offset``; the part that is already known is dropped."""
        new = text[self.num_chars - offset :] if offset < self.num_chars else text
        if new:
            self.texts.append(new)
            self.num_chars += len(new)

    def add_tokens(self, tokens: list[Token]) -> None:
        """Add tokens, for a call whose answer shows them."""
        self.tokens += tokens
        self.cumulative_logprob += sum(token.logprob or 0.0 for token in tokens)

    def add_starts(self, lengths: Sequence[int], offset: int, num_tokens: int) -> None:
        """Record where tokens begin: the last ``len(lengths)`` of ``num_tokens`` tokens have these lengths in
        characters, from ``offset`` on. Tokens that are known already are skipped."""
        known = len(self.token_starts) - (num_tokens - len(lengths))
        for place, length in enumerate(lengths):
            if place >= known:
                self.token_starts.append(offset)
            offset += length

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Reasoning tokens in the text parsed so far; None: reasoning is not parsed."""
        spans = None if self.parser is None else self.parser.reasoning_spans
        if spans is None:
            return None
        starts = self.token_starts
        return sum(bisect_left(starts, end) - bisect_left(starts, begin) for begin, end in spans)

    def take_tokens(self) -> list[Token]:
        """The tokens since the last call, once."""
        tokens, self.tokens = self.tokens, []
        return tokens

    @property
    def shown_finish_reason(self) -> str | None:
        """The finish reason that the client sees: ``tool_calls`` if the model stopped after tool calls."""
        calls = self.finish_reason == "stop" and self.parser is not None and self.parser.calls_tools
        return "tool_calls" if calls else self.finish_reason

    def take_text(self) -> str:
        """The text since the last call, once."""
        texts = self.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        texts.clear()
        return text


class LoggedChoice(Choice):
    """A choice that also keeps its whole output, for the request log."""

    __slots__ = ("said",)

    def __init__(self, index: int, request: OpenRequest) -> None:
        super().__init__(index, request)
        self.said: list[str] = []

    def add_text(self, text: str, offset: int) -> None:
        known = self.num_chars
        super().add_text(text, offset)
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
        self.choices = [choice(first_index + i, self) for i in range(n)]
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

    @property
    def is_read_by_all(self) -> bool:
        """Whether no other open call reads it."""
        return all(each.call.closed or each is self for each in self.peers)

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
    ) -> None:
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
        self.cache_block_size = 0
        """Tokens of a block of the prefix cache; 0: there is none."""
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

    def show(self, details: AnswerDetails | None) -> None:
        """Set the details of the answer, and begin to parse the outputs if they ask for it."""
        self.details = details
        if details is not None and details.parsing is not None:
            for choice in self.choices:
                choice.parser = OutputParser(details.parsing, f"{choice.request.request_id}/{choice.index}")

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
