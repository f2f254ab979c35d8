"""Server-sent events: writing them without letting a slow client hold anything up, and the exact OpenAI chunks.

A chunk is put together from bytes prepared once per call; only the text goes through the JSON encoder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web

from web.asked import StreamOptions
from web.calls import Call, Choice, OpenRequest
from web.errors import ApiError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


class Streams:
    """All event streams of an ingress, so that one tick can look for those whose client takes nothing any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._open: set[EventStream] = set()

    def add(self, stream: EventStream) -> None:
        self._open.add(stream)

    def remove(self, stream: EventStream) -> None:
        self._open.discard(stream)

    def cut_blocked(self, limit_s: float) -> int:
        """Drop the connections whose last write has not been taken for ``limit_s``; returns how many.

        Their handlers are cancelled by that, as by any disconnect. Looking once in a while instead of a timer per write
        keeps the writes cheap.
        """
        now_s = self.clock()
        blocked = [
            stream for stream in self._open
            if stream.writing_since_s is not None and now_s - stream.writing_since_s > limit_s
        ]  # fmt: skip
        for stream in blocked:
            stream.cut()
        return len(blocked)


class EventStream:
    """One response of events. Opened with its first bytes, so that an error before them can still be a status."""

    def __init__(self, request: web.Request, streams: Streams, headers: Mapping[str, str] = HEADERS) -> None:
        self._request = request
        self._streams = streams
        self._response = web.StreamResponse(headers=headers)
        self.writing_since_s: float | None = None

    @property
    def opened(self) -> bool:
        return self._response.prepared

    async def write(self, events: bytes) -> None:
        """Write, waiting while the client is behind.

        Raises:
            ConnectionResetError: the client is gone.
        """
        self.writing_since_s = self._streams.clock()
        if not self._response.prepared:
            await self._open()
        await self._response.write(events)
        self.writing_since_s = None

    async def _open(self) -> None:
        self._streams.add(self)
        await self._response.prepare(self._request)

    async def end(self, events: bytes) -> web.StreamResponse:
        """Write the last events and end the response."""
        self.writing_since_s = self._streams.clock()
        if not self._response.prepared:
            await self._open()
        await self._response.write_eof(events)
        self.writing_since_s = None
        return self._response

    def close(self) -> None:
        """Whatever happened, the stream is over."""
        self._streams.remove(self)

    def cut(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.abort()


def event(data: object) -> bytes:
    """``data: {...}`` and an empty line."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_events(error: ApiError) -> bytes:
    """How a stream that has begun tells of an error."""
    return event(error.body()) + DONE


def usage_of(requests: Sequence[OpenRequest]) -> dict[str, Any]:
    """Token counts; a prompt counts once however many choices it has."""
    return _usage(
        sum(request.num_prompt_tokens for request in requests),
        sum(request.num_output_tokens for request in requests),
        sum(request.num_cached_tokens for request in requests),
    )


def choice_usage(choice: Choice) -> dict[str, Any]:
    """Token counts of one choice so far."""
    request = choice.request
    report = request.call.report
    num_tokens = 0 if report is not None and report.prompt_only else choice.num_tokens
    return _usage(request.num_prompt_tokens, num_tokens, request.num_cached_tokens)


def _usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Chunks:
    """The chunks of one call. Subclasses know what one kind of choice looks like."""

    object: str

    def __init__(self, public_id: str, created_s: int, model: str, options: StreamOptions) -> None:
        self.head = {"id": public_id, "object": self.object, "created": created_s, "model": model}
        self._prefix = b"data: " + orjson.dumps(self.head)[:-1] + b',"choices":[{"index":'
        self.options = options

    def resume(self, choices: Sequence[Choice]) -> None:
        """The client has what the choices say it has: their beginnings are not told again."""

    def of(self, changed: Sequence[Choice]) -> bytes:
        """Events for what is new in these choices; empty if nothing is to be shown."""
        return b"".join([self._choice(choice) for choice in changed])

    def last(self, call: Call) -> bytes:
        """The end of the stream: the usage chunk, if asked for, and ``[DONE]``."""
        if not self.options.usage:
            return DONE
        return event({**self.head, "choices": [], "usage": usage_of(call.requests)}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that has begun and cannot go on."""
        return error_events(error)

    def _choice(self, choice: Choice) -> bytes:
        raise NotImplementedError

    def _tail(self, choice: Choice) -> bytes:
        """From the end of the choice to the end of the event."""
        if self.options.continuous:
            return b'}],"usage":' + orjson.dumps(choice_usage(choice)) + b"}\n\n"
        return b'}],"usage":null}\n\n' if self.options.usage else b"}]}\n\n"


def _finish(choice: Choice) -> bytes:
    """The finish fields of a choice that has ended."""
    reason, stop = orjson.dumps(choice.finish_reason), orjson.dumps(choice.stop_reason)
    return b'"logprobs":null,"finish_reason":' + reason + b',"stop_reason":' + stop


GOES_ON = b',"logprobs":null,"finish_reason":null'


class CompletionChunks(Chunks):
    """``text_completion``: the last text and the finish reason share a chunk."""

    object = "text_completion"

    def _choice(self, choice: Choice) -> bytes:
        text = choice.take_text()
        finished = choice.finish_reason is not None
        if not text and not finished and not self.options.continuous:
            return b""
        fields = b"," + _finish(choice) if finished else GOES_ON
        start = b'%s%d,"text":' % (self._prefix, choice.index)
        return start + orjson.dumps(text) + fields + self._tail(choice)


class ChatChunks(Chunks):
    """``chat.completion.chunk``: first the role, then content, then an empty delta with the finish reason."""

    object = "chat.completion.chunk"

    def __init__(self, public_id: str, created_s: int, model: str, options: StreamOptions) -> None:
        super().__init__(public_id, created_s, model, options)
        self._begun: set[int] = set()

    def resume(self, choices: Sequence[Choice]) -> None:
        self._begun.update(choice.index for choice in choices if choice.num_tokens)

    def _choice(self, choice: Choice) -> bytes:
        text, tail = choice.take_text(), self._tail(choice)
        start = b'%s%d,"delta":{' % (self._prefix, choice.index)
        events = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            events = start + b'"role":"assistant","content":""}' + GOES_ON + tail
        if text or (self.options.continuous and choice.finish_reason is None):
            events += start + b'"content":' + orjson.dumps(text) + b"}" + GOES_ON + tail
        if choice.finish_reason is not None:
            events += start + b"}," + _finish(choice) + tail
        return events
