"""Dead letters: messages that could not be processed. They are stored, read, requeued and dropped here.

The frame of a dead letter is the original frame with the reason and the origin added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pagebus.bus.codec import Frame, encode
from pagebus.bus.contract import START, Bus, BusError, Entry, EntryId
from pagebus.bus.messages import Message
from pagebus.bus.streams import Names

DEAD_LETTERS_KEPT = 1000
"""The most entries of a stage's dead-letter stream; the oldest are dropped first."""

REASON, SOURCE, SOURCE_ID, DELIVERIES = b"dead.reason", b"dead.stream", b"dead.id", b"dead.deliveries"


def dead_letter_frame(entry: Entry, reason: str) -> Frame:
    """The fields to store. They still decode as the message; ``Entry.raw`` has the ``dead.*`` fields too."""
    frame: Frame = dict(entry.raw or {})
    if not frame and entry.message is not None:
        frame = encode(entry.message)
    frame[REASON] = (reason or entry.error).encode(errors="replace")[:4096]
    frame[SOURCE] = entry.stream.encode(errors="replace")
    frame[SOURCE_ID] = str(entry.id).encode()
    frame[DELIVERIES] = str(entry.deliveries).encode()
    return frame


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter. ``id`` is its position in the stage's stream; ``message`` is None if it cannot be decoded."""

    stage: str
    id: EntryId
    reason: str
    source: str
    source_id: str
    deliveries: int
    message: Message | None
    num_bytes: int

    @property
    def died_s(self) -> float:
        """The time at which it was stored, by the server's clock."""
        return self.id.epoch / 1000

    @property
    def request_id(self) -> str | None:
        """The id of its request, if it belongs to one."""
        found = getattr(self.message, "request_id", None)
        return found if isinstance(found, str) else None


async def read_dead_letters(bus: Bus, names: Names, stage: str) -> list[DeadLetter]:
    """The dead letters of a stage, the oldest first."""
    entries = await bus.read({names.dead_letters(stage): START}, count=DEAD_LETTERS_KEPT, block_ms=0)
    return [_dead_letter(stage, entry) for entry in entries]


def _dead_letter(stage: str, entry: Entry) -> DeadLetter:
    raw = entry.raw or {}

    def text(field: bytes) -> str:
        return raw.get(field, b"").decode(errors="replace")

    deliveries = text(DELIVERIES)
    return DeadLetter(
        stage=stage,
        id=entry.id,
        reason=text(REASON),
        source=text(SOURCE),
        source_id=text(SOURCE_ID),
        deliveries=int(deliveries) if deliveries.isdecimal() else 0,
        message=entry.message,
        num_bytes=sum(map(len, raw.values())),
    )


async def requeue(bus: Bus, names: Names, letter: DeadLetter) -> None:
    """Send the message again to the stage that failed on it, and delete the dead letter.

    Raises:
        BusError: it cannot be decoded, or it belongs to a log, whose writer alone gives entries their places.
    """
    if letter.message is None:
        raise BusError(f"{letter.id} of {letter.stage} cannot be decoded, so no actor can process it")
    if letter.source not in (names.requests, names.tokenized, names.control):
        raise BusError(f"{letter.id} of {letter.stage} comes from {letter.source}: only work can be done again")
    await bus.publish([(letter.source, letter.message)])
    await drop(bus, names, letter.stage, [letter.id])


async def drop(bus: Bus, names: Names, stage: str, ids: Collection[EntryId]) -> int:
    """Remove dead letters for good; returns how many there were."""
    return await bus.remove(names.dead_letters(stage), ids)
