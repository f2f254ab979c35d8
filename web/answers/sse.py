"""Server-sent events: OpenAI's chunks, as bytes.

A chunk is assembled from bytes prepared once per call. Only its text goes through the JSON encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from pagebus.web.answers import null_fields
from pagebus.web.answers.timings import timings_of
from pagebus.web.calls.call import Call, Choice, OpenRequest
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.parsed_request import StreamOptions

DONE = b"data: [DONE]\n\n"


def event(data: object) -> bytes:
    """``data: {...}`` and an empty line."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def error_events(error: ApiError) -> bytes:
    """The events that report an error in a stream that has begun."""
    return event(error.body()) + DONE


def usage_of(requests: Sequence[OpenRequest]) -> dict[str, Any]:
    """Token counts; a prompt counts once however many choices it has."""
    choices = [choice for request in requests for choice in request.choices]
    return _usage(requests, sum(request.num_output_tokens for request in requests), _details(choices))


def _shown_tokens(choice: Choice) -> int:
    """Output tokens that the client sees."""
    return choice.num_tokens if choice.request.shows_output else 0


def prompt_usage(choice: Choice) -> dict[str, Any]:
    """Token counts before a choice has any."""
    return _usage([choice.request], 0, {name: 0 for name in _details([choice]) or ()} or None)


def _details(choices: Sequence[Choice]) -> dict[str, int] | None:
    """Kinds of output tokens: of reasoning, where somebody asks for it, and of a prediction, where there is one."""
    thoughts = [count for choice in choices if (count := choice.num_reasoning_tokens) is not None]
    told = {"reasoning_tokens": sum(thoughts)} if thoughts else {}
    if any(each for choice in choices for each in choice.predicted):
        told["accepted_prediction_tokens"] = sum(choice.predicted[0] for choice in choices)
        told["rejected_prediction_tokens"] = sum(choice.predicted[1] for choice in choices)
    return told or None


def _usage(requests: Sequence[OpenRequest], output_tokens: int, details: dict[str, int] | None) -> dict[str, Any]:
    """``details``: kinds of output tokens."""
    prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(request.num_cached_tokens for request in requests),
            "created_cache_tokens": sum(request.num_created_cache_tokens for request in requests),
            "multimodal_tokens": None,
        },
        "completion_tokens_details": details,
    }


def written_usage(choice: Choice) -> bytes:
    """Token counts of one choice so far, as JSON like that of :func:`_usage`; written for every event."""
    request, details = choice.request, _details([choice])
    prompt_tokens, output_tokens = request.num_prompt_tokens, _shown_tokens(choice)
    counts = prompt_tokens, output_tokens, prompt_tokens + output_tokens, request.num_cached_tokens
    written = b"null" if details is None else orjson.dumps(details)
    return _USAGE % (*counts, request.num_created_cache_tokens, written)


_USAGE = (
    b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d,'
    b'"created_cache_tokens":%d,"multimodal_tokens":null},"completion_tokens_details":%b}'
)


class Chunks:
    """The chunks of one call. Subclasses know what one kind of choice looks like.

    All but its text is the same in each event of a choice that goes on, so it is put together once.
    """

    object: str
    before_text, after_text = b"", b""
    """The bytes around the text of an unfinished choice, behind its index."""

    def __init__(self, public_id: str, created_s: int, model: str, options: StreamOptions) -> None:
        self.head = {"id": public_id, "object": self.object, "created": created_s, "model": model}
        self.opening = b"data: " + orjson.dumps(self.head)[:-1] + b',"choices":['
        """The beginning of each event with choices."""
        self._prefix = self.opening + b'{"index":'
        self.options = options
        self._starts: dict[int, bytes] = {}
        """Events up to the text, by the index of the choice."""
        end = self.after_text + b"}]" + TRANSFER_NULLS
        self._before_usage = end + b',"usage":'
        self._end = end + (b',"usage":null}\n\n' if options.usage else b"}\n\n")
        """The end of an event after its text, if events have no usage."""

    def of(self, changed: Sequence[Choice]) -> bytes:
        """Events for what is new in these choices; empty if nothing is to be shown."""
        return self._choice(changed[0]) if len(changed) == 1 else b"".join([self._choice(choice) for choice in changed])

    def last(self, call: Call) -> bytes:
        """The end of the stream: the usage chunk, if asked for, and ``[DONE]``."""
        if not self.options.usage:
            return DONE
        told: dict[str, Any] = {"choices": [], "usage": usage_of(call.requests)}
        if call.tells_times:
            told["metrics"] = timings_of(call)
        return event({**self.head, **told}) + DONE

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that has begun and cannot go on."""
        return error_events(error)

    def _choice(self, choice: Choice) -> bytes:
        raise NotImplementedError

    def _goes_on(self, choice: Choice, text: str) -> bytes:
        """The event of ``text`` of a choice that goes on."""
        start = self._starts.get(choice.index)
        if start is None:
            start = self._starts[choice.index] = self._prefix + b"%d" % choice.index + self.before_text
        if self.options.continuous:
            return start + orjson.dumps(text) + self._before_usage + written_usage(choice) + b"}\n\n"
        return start + orjson.dumps(text) + self._end

    def tail(self, choice: Choice, nulls: bytes, *, begins: bool = False) -> bytes:
        """From the end of the choice to the end of the event. ``nulls``: fields beside the choices; ``begins``: nothing
        of the choice is told yet."""
        if self.options.continuous:
            usage = orjson.dumps(prompt_usage(choice)) if begins else written_usage(choice)
            return b"}]" + nulls + b',"usage":' + usage + b"}\n\n"
        return b"}]" + nulls + (b',"usage":null}\n\n' if self.options.usage else b"}\n\n")


def _finish(choice: Choice) -> bytes:
    """The finish fields of a choice that has ended."""
    reason, stop = orjson.dumps(choice.finish_reason), orjson.dumps(choice.stop_reason)
    return b'"logprobs":null,"finish_reason":' + reason + b',"stop_reason":' + stop


def _written(nulls: null_fields.NullFields) -> bytes:
    """``,"name":null`` for each."""
    return b"," + orjson.dumps(nulls)[1:-1]


GOES_ON = b',"logprobs":null,"finish_reason":null'
PROMPT_NULLS, CHAT_NULLS = _written(null_fields.PROMPT), _written(null_fields.CHAT_CHOICE)
PART_NULLS, TRANSFER_NULLS = _written(null_fields.COMPLETION_PART), _written(null_fields.TRANSFER)


class CompletionChunks(Chunks):
    """``text_completion``: the last text and the finish reason share a chunk."""

    object = "text_completion"
    before_text, after_text = b',"text":', GOES_ON + b',"stop_reason":null' + PART_NULLS

    def _choice(self, choice: Choice) -> bytes:
        text = choice.take_text()
        if choice.finish_reason is None:
            return self._goes_on(choice, text) if text or self.options.continuous else b""
        start = b'%s%d,"text":' % (self._prefix, choice.index)
        fields = b"," + _finish(choice) + PART_NULLS
        return start + orjson.dumps(text) + fields + self.tail(choice, TRANSFER_NULLS)


class ChatChunks(Chunks):
    """``chat.completion.chunk``: first the role, then content, then an empty delta with the finish reason."""

    object = "chat.completion.chunk"
    before_text, after_text = b',"delta":{"content":', b"}" + GOES_ON + CHAT_NULLS

    def __init__(self, public_id: str, created_s: int, model: str, options: StreamOptions) -> None:
        super().__init__(public_id, created_s, model, options)
        self._begun: set[int] = set()

    def _choice(self, choice: Choice) -> bytes:
        text, goes_on = choice.take_text(), choice.finish_reason is None
        events = b"" if choice.index in self._begun else self._begin(choice)
        if text or (goes_on and self.options.continuous):
            events += self._goes_on(choice, text)
        if goes_on:
            return events
        start = b'%s%d,"delta":{},' % (self._prefix, choice.index)
        return events + start + _finish(choice) + CHAT_NULLS + self.tail(choice, TRANSFER_NULLS)

    def _begin(self, choice: Choice) -> bytes:
        """The event of the role."""
        self._begun.add(choice.index)
        start = b'%s%d,"delta":{"role":"assistant","content":""}' % (self._prefix, choice.index)
        return start + GOES_ON + self.tail(choice, PROMPT_NULLS, begins=True)
