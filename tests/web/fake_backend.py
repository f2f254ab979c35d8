"""Everything behind the ingress, in one small object: it holds the leases, reads requests and control, and answers.

Its model speaks one sentence, a word per token. It honours n, max_tokens, stop, ignore_eos and the context length, so
that a client cannot tell it from a very dull model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from pagebus.actors.settings import Settings
from pagebus.bus.contract import Bus
from pagebus.bus.messages import (
    AbortRequest,
    BlockRequested,
    BlockState,
    CacheResetRequested,
    CancelRequest,
    FinishReason,
    GenerateRequest,
    HoldRequested,
    HoldState,
    Message,
    PromptReply,
    ReplyBatch,
    RequestFailed,
    RequestsDone,
    SamplingParams,
    SchedulerState,
    StateRequested,
)
from pagebus.bus.streams import SCHEDULER_GROUP, TOKENIZER_GROUP, Names
from pagebus.web.app import IngressActor
from pagebus.web.requests.served_model import ServedModel
from tests.helpers import patience
from tests.helpers.waiting import until

KINDS = (("tokenizer", "tokenizer-0"), ("scheduler", "leader"), ("executor", "executor-0"), ("detokenizer", "detok-0"))
SENTENCE = ("Hello", " there", ",", " dear", " friend", ".")
MODEL = ServedModel(
    names=("fake-model", "alias"), vocab_size=1000, max_model_len=512, created_s=1_700_000_000, hidden_size=8
)
SAY = "Say: "
CACHED_TOKENS = 1


@dataclass(frozen=True)
class Delta:
    """One column of a :class:`ReplyBatch`."""

    request_id: str
    text: str
    num_output_tokens: int
    choice_index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 3
    num_cached_tokens: int = CACHED_TOKENS
    text_offset: int | None = None


def batch(deltas: Iterable[Delta]) -> ReplyBatch:
    """The columns of these deltas."""
    rows = list(deltas)

    def ints(values: Iterable[int]) -> np.ndarray:
        return np.array(list(values), np.int32)

    return ReplyBatch(
        request_ids=tuple(row.request_id for row in rows),
        texts=tuple(row.text for row in rows),
        finish_reasons=tuple(row.finish_reason for row in rows),
        stop_reasons=tuple(row.stop_reason for row in rows),
        choice_indexes=ints(row.choice_index for row in rows),
        num_output_tokens=ints(row.num_output_tokens for row in rows),
        num_prompt_tokens=ints(row.num_prompt_tokens for row in rows),
        num_cached_tokens=ints(row.num_cached_tokens for row in rows),
        text_offsets=ints(row.text_offset for row in rows if row.text_offset is not None),
    )


def num_prompt_tokens(request: GenerateRequest) -> int:
    """A word is a token."""
    if request.messages is not None:
        return sum(len(message["content"].split()) + 1 for message in request.messages)
    return len(request.prompt.split()) if request.prompt is not None else len(request.prompt_token_ids)


def speak(request: GenerateRequest, choice: int) -> list[Delta]:
    """The deltas of one choice: the sentence, or what the last message says that it should say; cut by stop strings or
    by max_tokens."""
    sampling = request.sampling
    limit = 200 if sampling.max_tokens is None else sampling.max_tokens
    words = [*SENTENCE[:-1], f" {choice}", SENTENCE[-1]] if choice else list(SENTENCE)
    last_message = request.messages[-1]["content"] if request.messages else ""
    if last_message.startswith(SAY):
        told = last_message.removeprefix(SAY)
        words = [told[place : place + 7] for place in range(0, len(told), 7)]
    finish: FinishReason = "stop"
    if sampling.ignore_eos:
        words = (words * limit)[:limit]
    if len(words) >= limit:
        words, finish = words[:limit], "length"
    text, stop_reason = "".join(words), None
    for stop in sampling.stop:
        if stop in text:
            text, finish, stop_reason = text[: text.index(stop)], "stop", stop
    deltas, said = [], ""
    for count, word in enumerate(words, 1):
        piece = text[len(said) : len(said) + len(word)]
        said += piece
        last = count == len(words) or (stop_reason is not None and said == text)
        deltas.append(
            Delta(request.request_id, piece, count, choice, finish if last else None, stop_reason if last else None,
                  num_prompt_tokens(request))
        )  # fmt: skip
        if last:
            break
    return deltas


def tell_tokens(replies: ReplyBatch, sampling: SamplingParams) -> ReplyBatch:
    """The batch with a token per row, if asked for.

    Its id is 10 more than its index, its log probability -1 - index / 4; alternatives are 21, 22 ... with -0.25 ...
    """
    if sampling.return_text_lengths:
        lengths = np.array([len(text) for text in replies.texts], np.int32)
        replies = replace(replies, length_counts=np.ones(len(lengths), np.int32), text_lengths=lengths)
    if sampling.logprobs is None and not sampling.return_token_ids:
        return replies
    count, indexes = len(replies.texts), replies.num_output_tokens - 1
    num_top = -1 if sampling.logprobs is None else sampling.logprobs
    if sampling.logprob_token_ids:  # 21 and 22, of those that were named
        num_top = sum(21 <= each <= 22 for each in sampling.logprob_token_ids)
    texts = {10 + int(index): word for index, word in zip(indexes, replies.texts, strict=True)}
    return replace(
        replies,
        token_texts=texts | {21 + place: f"t{place}" for place in range(num_top)},
        token_bytes={21: "e4bd"} if num_top > 0 else {},
        token_counts=np.ones(count, np.int32),
        token_ids=10 + indexes,
        token_bits=(-1 - indexes / 4).astype(np.float32).view(np.int32),
        top_counts=np.full(count, num_top, np.int32),
        top_ids=np.tile(np.arange(21, 21 + max(num_top, 0), dtype=np.int32), count),
        top_bits=np.tile(-0.25 * np.arange(1, 1 + max(num_top, 0), dtype=np.float32), count).view(np.int32),
    )


def tell_prompt(request: GenerateRequest) -> PromptReply:
    """The prompt's words with ids 1, 2 ..., each with the log probability -3 and rank 7; pooled it is (count, 2, 0, 0
    ...)."""
    if request.sampling.pooling:
        state = np.zeros(MODEL.hidden_size or 0, np.float32)
        state[:2] = num_prompt_tokens(request), 2
        return PromptReply(request_id=request.request_id, text="", pooled_bits=state.view(np.int32))
    count, num_top = num_prompt_tokens(request), request.sampling.prompt_logprobs
    words = request.prompt.split() if request.prompt else [f"<{place}>" for place in range(count)]
    scored = 0 if num_top is None else max(count - 1, 0)
    ends = np.cumsum([len(word) + 1 for word in words]) - 1
    offsets = np.stack([ends - [len(word) for word in words], ends], axis=1).reshape(-1).astype(np.int32)
    return PromptReply(
        request_id=request.request_id,
        text=" ".join(words),
        num_top=num_top,
        token_texts=dict(enumerate(words, 1)) | {21 + i: f"t{i}" for i in range(num_top or 0)},
        token_ids=np.arange(1, count + 1, dtype=np.int32),
        token_bits=np.full(scored, -3, np.float32).view(np.int32),
        ranks=np.full(scored, 7, np.int32),
        top_ids=np.tile(np.arange(21, 21 + (num_top or 0), dtype=np.int32), scored),
        top_bits=np.tile(-0.25 * np.arange(1, 1 + (num_top or 0), dtype=np.float32), scored).view(np.int32),
        token_offsets=offsets if request.return_token_offsets and not len(request.prompt_token_ids) else offsets[:0],
    )


@dataclass
class FakeBackend:
    """``answers``: whether it answers by itself; else the test does, with :meth:`send`."""

    bus: Bus
    names: Names = field(default_factory=Names)
    answers: bool = True
    max_model_len: int = 512
    at_once: bool = False
    """Whether an answer comes in one go, instead of token by token."""

    def __post_init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborts: list[str] = []
        self.left: list[str] = []
        """Those of the aborts whose clients may come back."""
        self.done: list[str] = []
        self.queries: list[StateRequested | BlockRequested | CancelRequest] = []
        self.answer: Callable[[Message], SchedulerState | BlockState | None] = lambda asked: (
            BlockState(serial=0) if isinstance(asked, BlockRequested) else None
        )
        """What it says to an observer's question."""
        self.epochs: dict[str, int] = {}
        self.held = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for stream, group in ((self.names.requests, TOKENIZER_GROUP), (self.names.control, SCHEDULER_GROUP)):
            await self.bus.create_group(stream, group)
        for kind, _ in KINDS:
            await self.join(kind)
        self._tasks = [asyncio.create_task(self._read_requests()), asyncio.create_task(self._read_control())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    async def join(self, kind: str, state: str = "ready", **info: object) -> None:
        """Take the lease of the actor of this kind."""
        name = dict(KINDS)[kind]
        self.epochs[kind] = await self.bus.acquire_lease(kind, name, {"state": state, **info}, ttl_s=1e6)

    async def leave(self, kind: str) -> None:
        await self.bus.release_lease(kind, dict(KINDS)[kind], self.epochs.pop(kind))

    async def send(self, ingress: str, *messages: Message) -> None:
        await self.bus.publish([(self.names.replies(ingress), message) for message in messages])

    async def requested(self, count: int = 1) -> list[GenerateRequest]:
        """Wait until so many requests have come."""
        await until(lambda: len(self.requests) >= count)
        return self.requests

    async def aborted(self, count: int = 1) -> list[str]:
        """Wait until so many aborts have come."""
        await until(lambda: len(self.aborts) >= count)
        return self.aborts

    async def _read_requests(self) -> None:
        while True:
            entries = await self.bus.read_group(TOKENIZER_GROUP, "fake", [self.names.requests])
            for entry in entries:
                assert isinstance(entry.message, GenerateRequest)
                self.requests.append(entry.message)
                if self.answers:
                    await self._answer(entry.message)
            await self.bus.ack(TOKENIZER_GROUP, entries)

    async def _read_control(self) -> None:
        while True:
            entries = await self.bus.read_group(SCHEDULER_GROUP, "fake", [self.names.control])
            for entry in entries:
                if isinstance(entry.message, RequestsDone):
                    self.done += entry.message.request_ids
                    continue
                if isinstance(entry.message, StateRequested | BlockRequested | CancelRequest):
                    await self._answer_question(entry.message)
                    continue
                if isinstance(entry.message, HoldRequested | CacheResetRequested):
                    await self._hold(entry.message)
                    continue
                assert isinstance(entry.message, AbortRequest)
                self.aborts.append(entry.message.request_id)
                self.left += [entry.message.request_id] if entry.message.may_return else []
            await self.bus.ack(SCHEDULER_GROUP, entries)

    async def _hold(self, message: HoldRequested | CacheResetRequested) -> None:
        """It is always at rest."""
        if isinstance(message, HoldRequested) and message.mode is not None:
            self.held = message.mode
        await self.send(message.ingress, HoldState(serial=message.serial, mode=self.held, at_rest=bool(self.held)))

    async def _answer_question(self, question: StateRequested | BlockRequested | CancelRequest) -> None:
        self.queries.append(question)
        answer = self.answer(question)
        if answer is not None and not isinstance(question, CancelRequest):
            await self.send(question.ingress, replace(answer, serial=question.serial))

    async def _answer(self, request: GenerateRequest) -> None:
        count = num_prompt_tokens(request)
        if count >= self.max_model_len:
            text = f"This model's maximum context length is {self.max_model_len} tokens; the prompt has {count}."
            failure = RequestFailed(
                request_id=request.request_id, status=400, error_type="BadRequestError", message=text, param="prompt"
            )
            await self.send(request.ingress, failure)
            return
        if request.tokens_only:
            await self.send(request.ingress, replace(tell_prompt(request), request_id=request.request_id))
            return
        rows = [speak(request, choice) for choice in range(request.sampling.n)]
        steps = max(map(len, rows))
        told: list[Message] = [tell_prompt(request)] if request.sampling.returns_prompt else []
        for step in range(steps):
            deltas = [row[step] for row in rows if step < len(row)]
            told.append(tell_tokens(batch(deltas), request.sampling))
        for messages in [told] if self.at_once else [[message] for message in told]:
            await self.send(request.ingress, *messages)


@dataclass
class Served:
    """An ingress that listens, and what is behind it."""

    actor: IngressActor
    backend: FakeBackend
    running: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.actor.port}"

    @property
    def address(self) -> str:
        """Where it gets its replies."""
        return self.actor.context.address

    async def refresh(self) -> None:
        """Make the ingress see the leases as they are now."""
        await self.actor.context.membership.refresh()

    async def stop(self) -> None:
        self.actor.request_drain()
        await self.running
        await self.backend.stop()
        await self.actor.bus.close()


Serve = Callable[..., Awaitable[Served]]
"""Start an ingress; options as of :func:`start_served`."""


async def start_served(
    open_bus: Callable[[], Bus], model: ServedModel = MODEL, *, answers: bool = True, **settings: object
) -> Served:
    """An ingress on a free port with a fake backend, ready to answer."""
    patience.views_of_ingresses()
    backend = FakeBackend(open_bus(), answers=answers, max_model_len=model.max_model_len or 512)
    await backend.start()
    options = {"port": 0, "drain_timeout_s": 0.05, "lease_ttl_s": 60.0} | settings
    actor = IngressActor(Settings(**options), open_bus(), "ingress-0", model=model)
    running = asyncio.create_task(actor.run())
    await until(lambda: running.done() or (actor.state == "ready" and not actor.context.missing()))
    if running.done():
        await running
    return Served(actor, backend, running)
