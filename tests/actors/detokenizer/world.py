"""A detokenizer on a memory bus, and the scheduler's and the executors' side of it, written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from pagebus.actors.detokenizer import actor as module
from pagebus.actors.detokenizer.actor import DetokenizerActor
from pagebus.actors.settings import Settings
from pagebus.bus.contract import START, Entry, EntryId, LogEntry
from pagebus.bus.memory.bus import MemoryBus, MemoryServer
from pagebus.bus.messages import (
    END_LENGTH,
    END_NONE,
    Message,
    ReplyBatch,
    SequenceStarted,
    StepResult,
)
from pagebus.bus.streams import Names
from tests.helpers.sampling_fields import gathered
from tests.helpers.tokenizer_factory import byte_level
from tests.helpers.waiting import until

NAMES = Names()
TEXT = "Hello 你好 🎉 world"
TOKENS: list[int] = byte_level().encode(TEXT).ids


def started(sequence_id: int = 1, **changes: Any) -> SequenceStarted:
    fields: dict[str, Any] = {
        "request_id": f"r{sequence_id}",
        "sequence_id": sequence_id,
        "choice_index": 0,
        "ingress": "in-0",
        "num_prompt_tokens": 7,
        "num_cached_tokens": 0,
        "max_tokens": 100,
    }
    return SequenceStarted(**gathered(SequenceStarted, fields | changes))


def step(*rows: tuple[int, int, int, int]) -> StepResult:
    """A step of (sequence id, token id, token index, end) rows."""
    columns = np.array(rows, np.int32).reshape(-1, 4).T
    return StepResult(
        step=1, scheduler_epoch=1, received_s=0, launched_s=0, done_s=0, num_computed_tokens=len(rows),
        sequence_ids=columns[0], token_ids=columns[1], token_indexes=columns[2], ends=columns[3],
    )  # fmt: skip


def steps(tokens: list[int], sequence_id: int = 1, first: int = 0, end: int = END_LENGTH) -> list[Message]:
    """A step per token; the last one has ``end``."""
    last = len(tokens) - 1
    return [step((sequence_id, t, first + i, end if i == last else END_NONE)) for i, t in enumerate(tokens)]


class World:
    """The scheduler's and the executors' side of the bus, and what comes out of the detokenizer."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.written: dict[str, int] = {}
        self.seen: dict[str, EntryId] = {}

    async def write(self, stream: str, *messages: Message, epoch: int = 1) -> None:
        """Append to a log stream under the next indexes."""
        entries = []
        for message in messages:
            index = self.written[stream] = self.written.get(stream, 0) + 1
            entries.append(LogEntry(stream, EntryId(epoch, index), message))
        await self.bus.append(entries)

    async def executor(self, name: str) -> int:
        return await self.bus.acquire_lease("executor", name, {"state": "ready"}, ttl_s=60)

    async def next(self, stream: str) -> list[Message]:
        """The next messages of a stream, at least one."""
        entries: list[Entry] = []
        while not entries:
            entries = await self.bus.read({stream: self.seen.get(stream, START)}, block_ms=2000)
        self.seen[stream] = entries[-1].id
        return [entry.message for entry in entries if entry.message is not None]

    async def replies(self, ingress: str = "in-0") -> list[tuple[str, str, str | None, int]]:
        """(request, text, finish reason, output tokens) per row, until a terminal one has come."""
        rows: list[tuple[str, str, str | None, int]] = []
        while not any(row[2] for row in rows):
            for message in await self.next(NAMES.replies(ingress)):
                assert isinstance(message, ReplyBatch)
                columns = (message.request_ids, message.texts, message.finish_reasons)
                rows += [
                    (request_id, text, reason, int(n))
                    for request_id, text, reason, n in zip(*columns, message.num_output_tokens, strict=True)
                ]
        return rows


@asynccontextmanager
async def running(world: World, settings: Settings, name: str = "detok-0") -> AsyncIterator[DetokenizerActor]:
    """An actor that is ready, with shorter pauses than usual; drained and ended at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TICK_S", 0.02)
        patch.setattr(module, "READ_BLOCK_MS", 20)
        actor = DetokenizerActor(settings, MemoryBus(world.server), name)
        task = asyncio.create_task(actor.run())
        try:
            await until(lambda: actor.state == "ready")
            yield actor
        finally:
            actor.request_drain()
            await task


def joined(rows: list[tuple[str, str, str | None, int]]) -> tuple[str, str | None, int]:
    """(whole text, finish reason, tokens) of one sequence's rows; counts must grow."""
    counts = [row[3] for row in rows]
    assert sorted(set(counts)) == counts
    return "".join(row[1] for row in rows), rows[-1][2], counts[-1]
