"""Own repeat or fenced: what a refused log entry means."""

from __future__ import annotations

from bus.contract import FENCE_INDEX, EntryId, LogEntry


def why_fenced(entry: LogEntry, last: EntryId) -> str:
    """Why a refused entry is not its writer's own repeat ("" if it is one); ``last`` is the stream's newest id.

    A fence that finds a newer writer is no failure: the old writer is shut out, which is all a fence is for.
    """
    if entry.id.index >= FENCE_INDEX:
        return ""
    if last.epoch > entry.id.epoch:
        return f"{entry.stream}: epoch {entry.id.epoch} was replaced by epoch {last.epoch}; {entry.id} is not written"
    if last.index >= FENCE_INDEX:
        return f"{entry.stream}: epoch {entry.id.epoch} was fenced; {entry.id} is not written"
    return ""
