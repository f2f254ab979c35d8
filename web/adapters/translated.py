"""Translates the chunks of a chat into the events of another API, so that the chat path serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import orjson

from pagebus.web.answers.sse import Chunks
from pagebus.web.calls.call import Call, Choice
from pagebus.web.http.errors import ApiError

Event = dict[str, Any]
"""``type`` is also its name."""


class Translator(Protocol):
    """Turns the chunks of one chat, in order, into events."""

    def chunk(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Events for a chunk; the last one with a choice has its finish reason, and one with usage follows."""
        ...

    def end(self) -> Iterator[Event]:
        """Events after the last chunk."""
        ...


class TranslatedChunks(Chunks):
    """Writes what ``chunks`` would write, translated."""

    def __init__(self, chunks: Chunks, translator: Translator, tell_error: Callable[[ApiError], bytes]) -> None:
        self._chunks, self._translator, self._tell_error = chunks, translator, tell_error

    def of(self, changed: Sequence[Choice]) -> bytes:
        return self._translated(self._chunks.of(changed))

    def last(self, call: Call) -> bytes:
        told = self._translated(self._chunks.last(call))
        return told + written(self._translator.end())

    def failed(self, error: ApiError) -> bytes:
        return self._tell_error(error)

    def _translated(self, data: bytes) -> bytes:
        events: list[bytes] = []
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                events += [named(event) for event in self._translator.chunk(orjson.loads(line[6:]))]
        return b"".join(events)


def written(events: Iterable[Event]) -> bytes:
    return b"".join(map(named, events))


def named(event: Event) -> bytes:
    """``event: <type>`` and its data."""
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
