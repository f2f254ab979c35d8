"""The detokenizer: reads what executors sampled, writes text to the ingresses that wait for it.

One atomic read covers ``sequences:<me>`` and the results of all replicas, in this order, so a sequence is known
before its tokens are seen. Everything a read gave is worked off at once and leaves as one :class:`ReplyBatch` per
ingress (and one more for what several ingresses read). Positions in the results streams are reported in the lease; the
scheduler trims what all detokenizers have passed. A stream this detokenizer has not reported a position for must not be
trimmed at all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Set
from contextlib import suppress
from typing import Any

from pagebus.actors.detokenizer.sequences import Sequences
from pagebus.actors.detokenizer.text import Decoder, make_decoder
from pagebus.actors.model.config import resolve_tokenizer
from pagebus.actors.model.tokenizer import load_tokenizer
from pagebus.actors.runtime.actor import Actor, describe
from pagebus.actors.runtime.bus_retry import BusRetry
from pagebus.actors.settings import Settings
from pagebus.bus.contract import FENCE_INDEX, START, BusUnavailable, Entry, EntryId
from pagebus.bus.messages import (
    ReplicaFenced,
    RequestFailed,
    SchedulerLeads,
    SequenceEnded,
    SequenceStarted,
    StepResult,
)
from pagebus.bus.outbox import Outbox

READ_COUNT = 1024
"""Entries per stream and read. A sequences stream that fills it holds the results of that read back."""
READ_BLOCK_MS = 500
TICK_S = 0.5
"""How often replicas are discovered, streams trimmed and positions reported."""
MAX_UNSENT = 4096
"""Messages that may wait to be sent before reading pauses."""
STAGE = "detokenizer"


def load_decoder(settings: Settings) -> Decoder:
    """The decoder of the configured tokenizer; one without text if the model has none. Blocks for a second or so.

    Raises:
        ModelError, TokenizerError: the model or its tokenizer cannot be used.
    """
    tokenizer = load_tokenizer(resolve_tokenizer(settings)) if settings.has_tokenizer else None
    return make_decoder(None if tokenizer is None else tokenizer.backend_tokenizer)


class DetokenizerActor(Actor):
    """See the module's text. Its lease says ``positions``: {"results:<replica>": "<epoch>-<index>"}, and whom it has
    heard last: ``scheduler_epoch``."""

    kind = "detokenizer"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._mailbox = self.names.sequences(self.name)
        self._sequences_position = START
        self._trimmed = START
        self._positions: dict[str, EntryId] = {}
        """Last entry worked off, by replica name. A new dict for each server of the bus."""
        self._reported: dict[str, str] = {}
        self._outbox: Outbox | None = None
        self._sequences: Sequences | None = None
        self._tokens = self.metrics.counter("pagebus:detokenizer_tokens", "Tokens detokenized.")
        self._live = self.metrics.gauge("pagebus:detokenizer_sequences", "Sequences whose text is under way.")
        self._refused = self.metrics.counter("pagebus:detokenizer_refused", "Requests ended with a 4xx here.")
        self._failures = self.metrics.counter("pagebus:detokenizer_failed", "Requests ended with a 5xx here.")

    def lease_info(self) -> dict[str, Any]:
        led_by = self._sequences_position.epoch
        return super().lease_info() | {"positions": self._position_info(), "scheduler_epoch": led_by}

    def _position_info(self) -> dict[str, str]:
        return {f"results:{replica}": str(position) for replica, position in self._positions.items()}

    async def start(self) -> None:
        """Load the decoder. What is in the own stream already was meant for an earlier life and is passed over: the
        scheduler announces all of it anew, once it has seen this one."""
        decoder = await asyncio.to_thread(load_decoder, self.settings)
        self._sequences = Sequences(decoder)
        self._outbox = Outbox(self.bus, self.epoch)
        self.log.info("decoder chosen", decoder=type(decoder).__name__)
        self.spawn(self._outbox.run(), "outbox")
        self._sequences_position = await BusRetry(self.log).until_taken(lambda: self.bus.last_id(self._mailbox))
        with suppress(BusUnavailable):  # else with the first tick
            await self._discover()
        self.spawn(self._tick(), "tick")

    async def serve(self) -> None:
        """Read, work off, publish, until draining and no sequence is left."""
        assert self._sequences is not None
        assert self._outbox is not None
        bus_retry = BusRetry(self.log, doing="no results are read")
        while not self.draining.is_set() or len(self._sequences):
            try:
                reached, positions = self._positions, self._read_set()
                entries = await self.bus.read(positions, count=READ_COUNT, block_ms=READ_BLOCK_MS)
            except BusUnavailable as error:
                await bus_retry.pause(error)
                continue
            bus_retry.back()
            await self.confirm_lease()  # for a revoked detokenizer, unread results may have been trimmed
            await self._handle(entries, positions.keys(), reached)
            await asyncio.sleep(0)  # the outbox sends what came of it, before more is read
            if self._outbox.depth > MAX_UNSENT:
                await self._outbox.flush()

    async def drain(self) -> None:
        if self._outbox is not None:
            await self._outbox.flush()
        await BusRetry(self.log).until_taken(lambda: self._trim(self._sequences_position))

    # -- one read -----------------------------------------------------------------------------------------------------

    def _read_set(self) -> dict[str, EntryId]:
        """Positions to read after; the sequences stream comes first."""
        positions = {self._mailbox: self._sequences_position}
        positions.update({self.names.results(replica): at for replica, at in self._positions.items()})
        return positions

    async def _handle(self, entries: list[Entry], streams: Set[str], reached: dict[str, EntryId]) -> None:
        """Take in what was read of ``streams``, and note in ``reached`` how far that is: in :attr:`_positions`, unless
        the bus has been started anew since."""
        assert self._sequences is not None
        replicas = {self.names.results(replica): replica for replica in reached}
        started = [entry for entry in entries if entry.stream == self._mailbox]
        for entry in started:
            self._sequences_position = entry.id
            await self._handle_sequence(entry)
        if len(started) >= READ_COUNT:
            self._publish()
            return  # more sequences wait: their tokens may be among these results, which are read again
        for entry in entries:
            replica = replicas.get(entry.stream)
            if replica is not None:
                reached[replica] = entry.id
                await self._handle_result(entry)
        if self._sequences.waiting:
            full = max(Counter(entry.stream for entry in entries).values(), default=0) >= READ_COUNT
            self._sequences.settle(complete=not full and not await self._found_more(streams))
        self._publish()

    async def _found_more(self, streams: Set[str]) -> bool:
        """Whether there may be results that were not read with ``streams`` because their replica has just joined."""
        try:
            await self._discover()
        except BusUnavailable:
            return True
        return not self._read_set().keys() <= streams

    async def _handle_sequence(self, entry: Entry) -> None:
        assert self._sequences is not None
        match entry.message:
            case SequenceStarted() as message:
                try:
                    self._sequences.start(message)
                except Exception as error:
                    self._sequences.refuse(message)
                    await self._refuse(entry, describe(error))
            case SequenceEnded():
                self._sequences.end(entry.message)
            case SchedulerLeads():
                self._sequences.void()
            case _:
                await self._refuse(entry)

    async def _handle_result(self, entry: Entry) -> None:
        assert self._sequences is not None
        match entry.message:
            case StepResult():
                try:
                    self._sequences.apply(entry.message)
                except Exception as error:
                    self._sequences.refuse_step(entry.message)
                    await self._refuse(entry, describe(error))
            case ReplicaFenced():
                pass
            case _:
                await self._refuse(entry)

    async def _refuse(self, entry: Entry, error: str = "") -> None:
        """Store something that does not belong here, or that no text can be made of, as a dead letter."""
        reason = error or entry.error or f"unexpected {type(entry.message).__name__}"
        self.log.error("entry refused", stream=entry.stream, id=str(entry.id), reason=reason)
        try:
            await self.bus.dead_letter(STAGE, entry, reason)
        except BusUnavailable as error:
            self.log.warning("dead letter not stored", id=str(entry.id), error=describe(error))

    def _note(self, failure: RequestFailed) -> None:
        """Metrics and the log line of a request that ends here; a client's error is no failure of the server."""
        log = self.log.bind(request_id=failure.request_id, reason=failure.message)
        if failure.status < 500:
            self._refused.inc()
            log.info("request refused", status=failure.status)
        else:
            self._failures.inc()
            log.error("request failed")

    def _publish(self) -> None:
        """Queue what the read gave: replies first, so that a client has its text before its blocks are gone."""
        assert self._sequences is not None
        assert self._outbox is not None
        output = self._sequences.take()
        for ingress, prompt in output.prompts:
            self._outbox.publish(self.names.replies(ingress), prompt)
        for ingress, batch in output.replies.items():
            self._outbox.publish(self.names.replies(ingress), batch)
        for ingress, failure in output.failures:
            self._note(failure)
            self._outbox.publish(self.names.replies(ingress), failure)
        for ingress, copy in output.copies:
            self._outbox.publish(self.names.replies(ingress), copy)
        for control in output.controls:
            self._outbox.publish(self.names.control, control)
        self._tokens.rise_to(self._sequences.num_tokens)
        if len(self._sequences) < self._live.value:
            self.publish_soon()
        self._live.set(len(self._sequences))

    def bus_restarted(self) -> None:
        """What had been trimmed may be there again; results may be gone, even the end of an executor's, so that it goes
        on below what was read here. All are read from their beginning: tokens that are known already change nothing."""
        self._trimmed = START
        self._positions = dict.fromkeys(self._positions, START)

    # -- beside the loop ----------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        """Find replicas, trim what was read of the own stream before (benchmarks read it too, and may be behind for a
        moment), report positions."""
        while True:
            read = self._sequences_position
            await asyncio.sleep(TICK_S)
            try:
                await self._discover()
                await self._trim(read)
            except BusUnavailable:
                continue  # the reading loop says so
            if self._position_info() != self._reported:
                self._reported = self._position_info()
                self.renew_soon()

    async def _discover(self) -> None:
        """Read every live replica from its beginning; forget one whose lease is gone and whose last entry was read."""
        live = {lease.name for lease in await self.bus.leases("executor")}
        for replica in live - self._positions.keys():
            self._positions[replica] = START
        for replica in self._positions.keys() - live:
            if self._positions[replica].index == FENCE_INDEX:
                del self._positions[replica]

    async def _trim(self, through: EntryId) -> None:
        if through > self._trimmed:
            await self.bus.trim(self._mailbox, through)
            self._trimmed = through
