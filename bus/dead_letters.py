"""The frame of a message that cannot be processed: its own fields, and why and from where it came."""

from __future__ import annotations

from bus.codec import Frame, encode
from bus.contract import Entry

DEAD_LETTERS_KEPT = 1000
"""Entries a stage's dead-letter stream keeps; the oldest go first."""

REASON, SOURCE, SOURCE_ID, DELIVERIES = b"dead.reason", b"dead.stream", b"dead.id", b"dead.deliveries"


def dead_letter_frame(entry: Entry, reason: str) -> Frame:
    """The fields to store; they still decode as the message, ``Entry.raw`` of it also shows the ``dead.*`` fields."""
    frame: Frame = dict(entry.raw or {})
    if not frame and entry.message is not None:
        frame = encode(entry.message)
    frame[REASON] = (reason or entry.error).encode(errors="replace")[:4096]
    frame[SOURCE] = entry.stream.encode(errors="replace")
    frame[SOURCE_ID] = str(entry.id).encode()
    frame[DELIVERIES] = str(entry.deliveries).encode()
    return frame
