"""Choices and chunks with :class:`pagebus.web.calls.answer_details.AnswerDetails`: logprobs, token ids, prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from pagebus.web.answers import null_fields
from pagebus.web.answers.sse import TRANSFER_NULLS, ChatChunks, Chunks, CompletionChunks
from pagebus.web.calls.answer_details import (
    AnswerDetails,
    PromptInfo,
    Token,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
    text_length,
)
from pagebus.web.calls.call import Call, Choice, OpenRequest
from pagebus.web.requests.parsed_request import StreamOptions


def shown_choices(call: Call, details: AnswerDetails) -> list[tuple[int, Choice]]:
    """The choices that a whole answer shows, with the index of each. If some are left out (``best_of``), those of each
    prompt are sorted by their likelihood."""
    shown: list[tuple[int, Choice]] = []
    for request in call.requests:
        choices = request.choices
        if details.num_choices < len(choices):
            choices = sorted(choices, key=lambda choice: -choice.cumulative_logprob)[: details.num_choices]
        shown += [(len(shown) + place, choice) for place, choice in enumerate(choices)]
    return shown


def completion_choice(index: int, choice: Choice, details: AnswerDetails) -> dict[str, Any]:
    """A choice of a whole completion."""
    request = choice.request
    body = {**null_fields.COMPLETION_CHOICE, **_completion_part(index, choice, details, first=True, offset=0)[0]}
    body |= {"finish_reason": _finish_reason(choice, details), "stop_reason": choice.stop_reason}
    if details.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(_prompt(request), request.call.texts, details.prompt_logprobs)
    return body


def chat_choice(index: int, choice: Choice, details: AnswerDetails) -> dict[str, Any]:
    """A choice of a whole chat."""
    text, tokens = choice.take_text(), choice.take_tokens()
    logprobs = None if details.logprobs is None else chat_logprobs(tokens, choice.request.call.texts, details)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.parser is not None:
        message = choice.parser.message(text)
    message = {**null_fields.MESSAGE, **message}
    if details.said:
        message["content"] = details.said + (message["content"] or "")
    body: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice.shown_finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": [token.id for token in tokens] if details.token_ids else None,
    }
    return body


def chat_extras(call: Call, details: AnswerDetails) -> dict[str, Any]:
    """What a whole chat's answer says of its prompt."""
    extras: dict[str, Any] = {}
    if details.prompt_logprobs is not None:
        extras["prompt_logprobs"] = prompt_logprobs(_prompt(call.requests[0]), call.texts, details.prompt_logprobs)
    if details.token_ids:
        extras["prompt_token_ids"] = _prompt(call.requests[0]).ids
    if details.prompt_text:
        extras["prompt_text"] = _prompt(call.requests[0]).text
    return extras


class DetailedCompletionChunks(CompletionChunks):
    """Completion chunks with details: the prompt goes before the first text of each choice."""

    def __init__(
        self, public_id: str, created_s: int, model: str, options: StreamOptions, details: AnswerDetails
    ) -> None:
        super().__init__(public_id, created_s, model, options)
        self._details = details
        self._offsets: dict[int, int] = {}

    def _choice(self, choice: Choice) -> bytes:
        details, request = self._details, choice.request
        if request.needs_prompt and request.prompt is None:
            return b""  # it comes before the end
        first, finished = choice.index not in self._offsets, choice.finish_reason is not None
        if not (choice.texts or choice.tokens or finished or self.options.continuous or (first and details.echo)):
            return b""
        offset = self._offsets.get(choice.index, 0)
        body, self._offsets[choice.index] = _completion_part(choice.index, choice, details, first=first, offset=offset)
        body["finish_reason"], body["stop_reason"] = _finish_reason(choice, details), choice.stop_reason
        return _event(self, body, choice)


class DetailedChatChunks(ChatChunks):
    """Chat chunks with details: tokens go with the content they are part of."""

    def __init__(
        self, public_id: str, created_s: int, model: str, options: StreamOptions, details: AnswerDetails
    ) -> None:
        super().__init__(public_id, created_s, model, options)
        self._details = details

    def _choice(self, choice: Choice) -> bytes:
        details, request = self._details, choice.request
        if request.needs_prompt and request.prompt is None:
            return b""
        events = b""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            body = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            body["finish_reason"] = None
            events = _event(self, body, choice, self._prompt_fields(request), begins=True)
            if details.said:
                body["delta"] = {"content": details.said}
                events += _event(self, body, choice, begins=True)
        tokens = choice.take_tokens()
        for delta in self._deltas(choice, tokens):
            logprobs = None if details.logprobs is None else chat_logprobs(tokens, request.call.texts, details)
            body = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
            body["token_ids"] = [token.id for token in tokens] if details.token_ids else None
            tokens = []
            events += _event(self, body, choice)
        if choice.finish_reason is not None:
            body = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": choice.shown_finish_reason}
            body |= {"stop_reason": choice.stop_reason, "token_ids": [] if details.token_ids else None}
            events += _event(self, body, choice)
        return events

    def _prompt_fields(self, request: OpenRequest) -> dict[str, Any]:
        """What the first chunk says of the prompt."""
        details = self._details
        return {
            "prompt_token_ids": _prompt(request).ids if details.token_ids else None,
            "prompt_text": _prompt(request).text if details.prompt_text else None,
        }

    def _deltas(self, choice: Choice, tokens: Sequence[Token]) -> list[dict[str, Any]]:
        """What is new. Tokens go with the first of several; if there is no text to go with, with an empty one."""
        text, ended = choice.take_text(), choice.finish_reason is not None
        deltas = [{"content": text}] if text else []
        if choice.parser is not None:
            deltas = choice.parser.deltas(text, ended=ended)
        if not deltas and (tokens or (self.options.continuous and not ended)):
            return [{"content": ""}]
        return deltas


def _event(
    chunks: Chunks, body: dict[str, Any], choice: Choice, extras: dict[str, Any] | None = None, *, begins: bool = False
) -> bytes:
    nulls = TRANSFER_NULLS if extras is None else b"," + orjson.dumps(extras)[1:-1]
    return chunks.opening + orjson.dumps(body)[:-1] + chunks.tail(choice, nulls, begins=begins)


def _completion_part(
    index: int, choice: Choice, details: AnswerDetails, *, first: bool, offset: int
) -> tuple[dict[str, Any], int]:
    """The next part of a completion's choice, without its finish fields, and the text offset after it."""
    request, names = choice.request, choice.request.call.texts
    text, tokens = choice.take_text(), choice.take_tokens()
    if details.prompt_only:
        text, tokens = "", []
    output_ids = [token.id for token in tokens]
    prompt = _prompt(request) if first and details.echo else None
    if prompt is not None:
        text = (prompt.text if request.prompt_text is None else request.prompt_text) + text
    body: dict[str, Any] = {"index": index, "text": text, "logprobs": None, **null_fields.COMPLETION_PART}
    if details.logprobs is not None and prompt is not None:
        body["logprobs"] = echoed_logprobs(prompt, tokens, names, details)
        offset = text_length([*prompt.tokens, *tokens], names)
    elif details.logprobs is not None:
        body["logprobs"] = completion_logprobs(tokens, names, details, offset)
        offset += text_length(tokens, names)
    if details.token_ids:
        body["token_ids"] = output_ids
        if first:
            body["prompt_token_ids"] = _prompt(request).ids
    return body, offset


def _finish_reason(choice: Choice, details: AnswerDetails) -> str | None:
    return "length" if details.prompt_only and choice.finish_reason is not None else choice.finish_reason


def _prompt(request: OpenRequest) -> PromptInfo:
    assert request.prompt is not None, "the prompt comes before any choice ends"
    return request.prompt
