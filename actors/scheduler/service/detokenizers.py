"""Writes announcements to detokenizers, over ``sequences:<detokenizer>``."""

from __future__ import annotations

from collections.abc import Iterable

from pagebus.bus.contract import FENCE_INDEX, START, EntryId
from pagebus.bus.messages import SchedulerLeads, SequenceEnded, SequenceStarted
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import Names


class Detokenizers:
    """Writes these streams, and remembers the last entry of each."""

    def __init__(self, names: Names, outbox: Outbox) -> None:
        self._names = names
        self._outbox = outbox
        self._told: dict[str, EntryId] = {}
        """By detokenizer, the last entry of its stream."""
        self._lost: set[str] = set()

    def expect(self, detokenizers: Iterable[str]) -> None:
        """Note detokenizers to which a predecessor may have written."""
        for name in detokenizers:
            self._told[name] = EntryId(self._outbox.epoch - 1, FENCE_INDEX)

    def lead(self, detokenizer: str) -> None:
        """Invalidate everything from earlier schedulers, before any other message."""
        self._lost.discard(detokenizer)
        if self._told.get(detokenizer, START).epoch < self._outbox.epoch:
            self._append(detokenizer, SchedulerLeads(epoch=self._outbox.epoch))

    def tell(self, detokenizer: str, message: SequenceStarted | SequenceEnded) -> None:
        """Send an announcement. Nothing is sent to one that is gone: no reader would read or trim it."""
        if detokenizer not in self._lost:
            self.lead(detokenizer)
            self._append(detokenizer, message)

    def lost(self, detokenizer: str) -> EntryId:
        """Mark a detokenizer as gone. Returns the last entry of its stream, START if there is none."""
        self._lost.add(detokenizer)
        return self._told.pop(detokenizer, START)

    def _append(self, detokenizer: str, message: SchedulerLeads | SequenceStarted | SequenceEnded) -> None:
        self._told[detokenizer] = self._outbox.append(self._names.sequences(detokenizer), message)
