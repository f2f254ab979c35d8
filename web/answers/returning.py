"""Resumable streams: each event gets an id, and a client that reconnects gets only the events it lacks.

After a reconnect the whole answer is generated from its first token, cut at the same places as before, and what the
client has is left out. The writers of events (tool parsers, other APIs' shapes) therefore need no knowledge of
resumption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagebus.web.answers.resume import BEGINNING, Had, Place, Seen, joined, split_events, with_id, with_ids
from pagebus.web.answers.sse import Chunks
from pagebus.web.calls.call import Call, Choice
from pagebus.web.http.errors import ApiError


class CatchUp:
    """Skips what a client already has of the choices of a call.

    Args:
        had: what it has of each.
        write: the events for a choice that has something new.
    """

    def __init__(self, choices: Sequence[Choice], had: Sequence[Had], write: Callable[[Choice], bytes]) -> None:
        self._behind = {choice.index: each for choice, each in zip(choices, had, strict=True) if each != Had()}
        self._write = write
        for choice in choices:
            behind = self._behind.get(choice.index, Had())
            choice.count_from((behind.towards or behind.place).num_tokens)

    def is_behind(self, choice: Choice) -> bool:
        """Whether something of the choice is to be skipped."""
        return choice.index in self._behind

    def waits(self, choice: Choice) -> bool:
        """Whether part of what the client has of the choice has not arrived again yet. (An end comes in any case.)"""
        had = self._behind.get(choice.index)
        if had is None:
            return False
        if choice.request.needs_prompt and choice.request.prompt is None:
            return True
        goal = had.towards or had.place
        reached = choice.num_tokens >= goal.num_tokens and choice.num_chars >= goal.num_chars and not goal.ended
        return not reached and choice.finish_reason is None

    def pass_over(self, choice: Choice) -> tuple[Had, list[bytes]]:
        """Skip what the client has of a choice that does not wait. Returns that, and the events that the client lacks
        of those it has in part."""
        had = self._behind.pop(choice.index, None)
        if had is None:
            return Had(), []
        if had.place != BEGINNING:
            self._write(_cut(choice, BEGINNING, had.place))
        if had.towards is None:
            return had, []
        events = split_events(self._write(_cut(choice, had.place, had.towards)))
        return had, events[had.num_events :]


def place_of(choice: Choice) -> Place:
    """The place after everything that has arrived of a choice."""
    return Place(choice.num_tokens, choice.num_chars, choice.finish_reason is not None)


def _cut(choice: Choice, start: Place, end: Place) -> Choice:
    """The choice as if nothing had come of it after ``end``, which is taken off it; it has been taken up to
    ``start``."""
    return choice.take_part(
        max(end.num_chars - start.num_chars, 0),
        max(end.num_tokens - start.num_tokens, 0),
        end_chars=end.num_chars,
        end_tokens=end.num_tokens,
        ended=end.ended,
    )


class ReturningChunks(Chunks):
    """Writes what ``chunks`` would write, with ids, behind what the client has ``seen``."""

    def __init__(self, chunks: Chunks, choices: Sequence[Choice], seen: Seen) -> None:
        self._chunks = chunks
        self._seen = seen
        self._told = [str(had) for had in seen.choices]
        """What the client has of each choice now, as ids say it."""
        self._catch_up = CatchUp(choices, seen.choices, lambda choice: chunks.of([choice]))

    def of(self, changed: Sequence[Choice]) -> bytes:
        return self._of(changed[0]) if len(changed) == 1 else b"".join([self._of(choice) for choice in changed])

    def _of(self, choice: Choice) -> bytes:
        if not self._catch_up.is_behind(choice):
            return self._news(choice)
        if self._catch_up.waits(choice):
            return b""
        had, rest = self._catch_up.pass_over(choice)
        told = b""
        if had.towards is not None:
            told = self._numbered(choice.index, joined(rest), had.towards)
            self._told[choice.index] = str(had.towards)
        return told if (had.towards or had.place).ended else told + self._news(choice)

    def _news(self, choice: Choice) -> bytes:
        return self._numbered(choice.index, self._chunks.of([choice]), place_of(choice))

    def _numbered(self, index: int, events: bytes, towards: Place) -> bytes:
        """Events that, behind what the client has, tell a choice up to ``towards``. If there are none, what has come
        goes with what comes next."""
        if not events:
            return b""
        num_events = events.count(b"\n\n")
        ids = [] if num_events == 1 else self._ids_between(index, num_events - 1, towards)
        self._told[index] = str(towards)
        return with_ids(events, [*ids, self._now()]) if ids else with_id(events, self._now())

    def _ids_between(self, index: int, count: int, towards: Place) -> list[str]:
        """Ids of the next ``count`` events that tell a choice up to ``towards``, and are followed by others."""
        had, ids = Had.parse(self._told[index]), []
        for number in range(had.num_events + 1, had.num_events + 1 + count):
            self._told[index] = str(Had(had.place, towards, number))
            ids.append(self._now())
        return ids

    def _now(self, num_last: int = 0) -> str:
        """What the client has now, and how many of the events at the end."""
        now = ",".join(self._told)
        return f"{now}!{num_last}" if num_last else now

    def last(self, call: Call) -> bytes:
        events = split_events(self._chunks.last(call))
        first = min(self._seen.num_last, len(events) - 1)  # a stream has its end in any case
        return with_ids(joined(events[first:]), [self._now(number) for number in range(first + 1, len(events) + 1)])

    def failed(self, error: ApiError) -> bytes:
        events = self._chunks.failed(error)
        return with_ids(events, [self._now()] * len(split_events(events)))
