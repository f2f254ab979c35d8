"""The tokenizer: takes requests off the work stream, turns prompts into token ids, hands them to the scheduler.

An entry is acked only after its outcome is stored: a :class:`TokenizedRequest` for the scheduler, or a
:class:`RequestFailed` for the ingress. So an outcome may come twice (a crash between the two), never not at all. What
kills the process is found out by trying suspects one at a time, in order: the first entry of what a crash left behind
is the one that was being worked on, and after ``MAX_DELIVERIES`` deliveries it goes to the dead letters.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from pagebus.actors.model.config import ModelConfig, effective_max_model_len, resolve_tokenizer
from pagebus.actors.model.tokenizer import load_tokenizer
from pagebus.actors.runtime.actor import Actor, describe
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.settings import Settings
from pagebus.actors.tokenizer.encode import INTERNAL, Encoder, Limits, Outcome
from pagebus.actors.tokenizer.grammar_check import GrammarChecker
from pagebus.actors.tokenizer.heavy import Heavy
from pagebus.actors.tokenizer.refusal import Refusal
from pagebus.actors.tokenizer.thoughts import behind_prompt
from pagebus.bus.contract import BusUnavailable, Entry, EntryId
from pagebus.bus.messages import (
    GenerateRequest,
    Message,
    PromptReply,
    SamplingParams,
    StructuredOutput,
    TokenizedRequest,
)
from pagebus.bus.streams import TOKENIZER_GROUP

READ_COUNT = 128
READ_BLOCK_MS = 500
FIRST_BATCH = 4
"""Requests that came together go on in batches, each twice as large as the one before: those of the first are computed
while the others are encoded."""
MAX_DELIVERIES = 3
STAGE = "tokenizer"
GIVEN_UP = "The request failed repeatedly and was given up."


def load_encoder(settings: Settings) -> Encoder:
    """The encoder of the configured model. Blocks for a second or so.

    Raises:
        ModelError, TokenizerError: the model or its tokenizer cannot be used.
    """
    config = ModelConfig.of(settings)
    length, encoder = effective_max_model_len(settings, config), config.spec.encoder
    limits = Limits(
        length, config.vocab_size, settings.block_size, hashed=settings.enable_prefix_caching and encoder is None,
        spare=int(config.pooler is None), segments=encoder is not None and encoder.types > 1,
    )  # fmt: skip
    tokenizer = load_tokenizer(resolve_tokenizer(settings)) if settings.has_tokenizer else None
    return Encoder(tokenizer, limits, chat_template=settings.chat_template)


def place(entry_id: EntryId) -> int:
    """The place of an entry in the order of all requests: milliseconds of Redis's clock, and its number in that one."""
    return (entry_id.epoch << 20) + entry_id.index


def batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """The first few entries, then twice as many, and so on."""
    begin, size = 0, FIRST_BATCH
    while begin < len(entries):
        yield entries[begin : begin + size]
        begin, size = begin + size, 2 * size


class TokenizerActor(Actor):
    """See the module's text."""

    kind = "tokenizer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._encoder: Encoder | None = None
        self._grammars = GrammarChecker(self.settings)
        self._trials: set[asyncio.Task[None]] = set()
        """Tasks of requests whose grammar is being tried, and of those that take long; others do not wait for them."""
        self._heavy = Heavy(lambda entry: self._process([entry]))
        self._next_claim_s = 0.0
        self.bus_retry = BusRetry(self.log)
        self._tokenized = self.metrics.counter("pagebus:tokenizer_requests", "Requests tokenized.")
        self._tokens = self.metrics.counter("pagebus:tokenizer_tokens", "Prompt tokens of tokenized requests.")
        self._told = self.metrics.counter("pagebus:tokenizer_told", "Prompts whose tokens a client asked for.")
        self._refused = self.metrics.counter("pagebus:tokenizer_refused", "Requests refused by the tokenizer (4xx).")
        self._failures = self.metrics.counter("pagebus:tokenizer_failed", "Requests the tokenizer failed on (5xx).")

    def lease_info(self) -> dict[str, Any]:
        most = None if self._encoder is None else self._encoder.max_chars
        return super().lease_info() | ({} if most is None else {"max_prompt_chars": most})

    async def start(self) -> None:
        self._encoder = await asyncio.to_thread(load_encoder, self.settings)
        if self.settings.has_tokenizer and not self._encoder.reads_text:
            self.log.warning("no tokenizer: prompts must be token ids")
        await self.bus_retry.until_taken(lambda: self.bus.create_group(self.names.requests, TOKENIZER_GROUP))

    async def drain(self) -> None:
        await asyncio.gather(*self._trials)

    async def stop(self) -> None:
        await self._grammars.close()
        if self._encoder is not None:
            self._encoder.close()

    async def serve(self) -> None:
        """Read, encode, publish, ack, until draining. What is in hand when draining starts is finished."""
        while not self.draining.is_set():
            try:
                await self._take_over()
                await self._handle(await self._read())
                self.bus_retry.back()
            except BusUnavailable as error:
                await self.bus_retry.pause(error)

    async def _read(self) -> list[Entry]:
        return await self.bus.read_group(
            TOKENIZER_GROUP, self.name, [self.names.requests], count=READ_COUNT, block_ms=READ_BLOCK_MS
        )

    async def _take_over(self) -> None:
        """Once per lease time: work off what tokenizers left behind whose lease is gone."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_claim_s:
            return
        consumers = await self.bus.consumers(self.names.requests, TOKENIZER_GROUP)
        live = {lease.name for lease in await self.bus.leases(self.kind)} | {self.name}
        for dead in sorted(consumers.keys() - live):
            claimed = await self.bus.claim(self.names.requests, TOKENIZER_GROUP, self.name, dead)
            if claimed:
                self.log.warning("took over requests of a tokenizer that is gone", tokenizer=dead, count=len(claimed))
                await self._handle(claimed)
        self._next_claim_s = now_s + self.settings.lease_ttl_s

    async def _handle(self, entries: Sequence[Entry]) -> None:
        """Fresh entries in batches; then what has been delivered before, one at a time."""
        fresh = [entry for entry in entries if entry.deliveries == 1]
        ready = []
        for entry in fresh:
            if self._needs_trial(entry):
                self._aside(self._process([entry]), "trial")
            elif not self._is_heavy(entry):
                ready.append(entry)
            elif self._heavy.add(entry):
                self._aside(self._heavy.run(), "heavy")
        for batch in batches(ready):
            await self._process(batch)
        suspects = [entry for entry in entries if entry.deliveries > 1]
        for position, entry in enumerate(suspects):
            if position == 0 and entry.deliveries >= MAX_DELIVERIES:
                await self._give_up(entry, f"delivered {entry.deliveries} times")
            else:
                await self._process([entry])

    def _aside(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Process it beside the other requests, which do not wait for it."""
        task = self.spawn(work, name)
        self._trials.add(task)
        task.add_done_callback(self._trials.discard)

    def _is_heavy(self, entry: Entry) -> bool:
        assert self._encoder is not None
        return isinstance(entry.message, GenerateRequest) and self._encoder.is_heavy(entry.message)

    def _needs_trial(self, entry: Entry) -> bool:
        """Whether the entry's request wants a grammar that has not been tried yet, or that its prompt decides."""
        wanted = entry.message.sampling.structured_output if isinstance(entry.message, GenerateRequest) else None
        return wanted is not None and (wanted.prompt_thought is not None or self._grammars.known(wanted) is None)

    async def _process(self, entries: Sequence[Entry]) -> None:
        """Encode (off the loop, if it takes long), store the outcomes, then ack."""
        good = [entry for entry in entries if isinstance(entry.message, GenerateRequest)]
        requests = [entry.message for entry in good if isinstance(entry.message, GenerateRequest)]
        checked = [await self._with_grammar(request) for request in requests]
        encoded = iter(await self._encode([each for each in checked if isinstance(each, GenerateRequest)]))
        outcomes = [each if isinstance(each, Outcome) else await self._behind_prompt(next(encoded)) for each in checked]
        replies = [self._address(entry, outcome) for entry, outcome in zip(good, outcomes, strict=True)]
        if replies:
            await self.bus_retry.until_taken(lambda: self.bus.publish(replies))
        for entry, outcome in zip(good, outcomes, strict=True):
            if outcome.error is not None:
                await self._bury(entry, describe(outcome.error))
        if outcomes:
            await self.bus_retry.until_taken(lambda: self.bus.ack(TOKENIZER_GROUP, good))
        for outcome in outcomes:
            self._note(outcome)
        for entry in entries:
            if not isinstance(entry.message, GenerateRequest):
                await self._give_up(entry, entry.error or f"unexpected {type(entry.message).__name__}")

    async def _with_grammar(self, request: GenerateRequest) -> GenerateRequest | Outcome:
        """The request with the grammar that its structured output comes to, or its refusal."""
        wanted = request.sampling.structured_output
        if wanted is None or wanted.prompt_thought is not None:
            return request
        grammar = await self._grammar(request, wanted)
        if isinstance(grammar, Outcome):
            return grammar
        return replace(request, sampling=_with_grammar(request.sampling, wanted, grammar))

    async def _behind_prompt(self, outcome: Outcome) -> Outcome:
        """The outcome with the grammar that its structured output comes to behind this prompt, or its refusal."""
        request, reply = outcome.request, outcome.reply
        wanted = request.sampling.structured_output
        if wanted is None or not isinstance(reply, TokenizedRequest):
            return outcome
        assert self._encoder is not None
        found = self._encoder.thought_in(reply.prompt_token_ids, wanted.reasoning)
        grammar = await self._grammar(request, behind_prompt(wanted, found))
        if isinstance(grammar, Outcome):
            return grammar
        sampling = _with_grammar(reply.sampling, wanted, grammar)
        return dataclasses.replace(outcome, reply=replace(reply, sampling=sampling))

    async def _grammar(self, request: GenerateRequest, wanted: StructuredOutput) -> str | Outcome:
        """The grammar that ``wanted`` comes to, or the refusal of its request."""
        try:
            verdict = await self._grammars.check(wanted)
            if verdict.problem:
                field, problem = await self._grammars.at_fault(wanted, verdict.problem, request.tools)
                return Outcome(request, Refusal(f"{field}: {problem}", param=field).reply(request))
        except (OSError, TimeoutError, ValueError) as error:
            return Outcome(request, Refusal(INTERNAL, status=500).reply(request), error)
        return verdict.grammar

    async def _encode(self, requests: list[GenerateRequest]) -> list[Outcome]:
        """Outcomes in order. If a whole batch fails, one by one, so that the request with the bug fails alone."""
        assert self._encoder is not None
        if not requests:
            return []
        try:
            if self._encoder.is_quick(requests):
                return self._encoder.encode(requests)
            return await asyncio.to_thread(self._encoder.encode, requests)
        except Exception as error:
            if len(requests) == 1:
                return [Outcome(requests[0], Refusal(INTERNAL, status=500).reply(requests[0]), error)]
        return [outcome for request in requests for outcome in await self._encode([request])]

    def _address(self, entry: Entry, outcome: Outcome) -> tuple[str, Message]:
        if isinstance(outcome.reply, TokenizedRequest):
            return self.names.tokenized, replace(outcome.reply, asked=place(entry.id))
        return self.names.replies(outcome.request.ingress), outcome.reply

    def _note(self, outcome: Outcome) -> None:
        """Metrics and log lines of one request."""
        log = self.log.bind(request_id=outcome.request.request_id)
        if isinstance(outcome.reply, TokenizedRequest):
            self._tokenized.inc()
            self._tokens.inc(len(outcome.reply.prompt_token_ids))
            if self.settings.enable_log_requests:
                log.info("tokenized", prompt_tokens=len(outcome.reply.prompt_token_ids))
        elif isinstance(outcome.reply, PromptReply):
            self._told.inc()
        elif outcome.error is not None:
            self._failures.inc()
            log.error("tokenizing failed", error=describe(outcome.error))
        else:
            self._refused.inc()
            log.info("request refused", status=outcome.reply.status, reason=outcome.reply.message)

    async def _give_up(self, entry: Entry, reason: str) -> None:
        """Dead letter, and an error for the client if the entry says whose it is."""
        request = entry.message if isinstance(entry.message, GenerateRequest) else None
        self.log.error("dead letter", id=str(entry.id), request_id=request and request.request_id, reason=reason)
        self._failures.inc()
        if request is not None:
            reply = Refusal(GIVEN_UP, status=500).reply(request)
            await self.bus_retry.until_taken(lambda: self.bus.publish([(self.names.replies(request.ingress), reply)]))
        await self._bury(entry, reason)
        await self.bus_retry.until_taken(lambda: self.bus.ack(TOKENIZER_GROUP, [entry]))

    async def _bury(self, entry: Entry, reason: str) -> None:
        await self.bus_retry.until_taken(lambda: self.bus.dead_letter(STAGE, entry, reason))


def _with_grammar(sampling: SamplingParams, wanted: StructuredOutput, grammar: str) -> SamplingParams:
    return replace(sampling, structured_output=None, grammar=grammar, grammar_field=wanted.field)
