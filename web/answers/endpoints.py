"""Endpoints that generate tokens or embeddings, over HTTP or as jobs: each parses its body and forms its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from aiohttp import web

from pagebus.web.answers import null_fields
from pagebus.web.answers.detailed import (
    DetailedChatChunks,
    DetailedCompletionChunks,
    chat_choice,
    chat_extras,
    completion_choice,
    shown_choices,
)
from pagebus.web.answers.sse import ChatChunks, Chunks, CompletionChunks, usage_of
from pagebus.web.answers.timings import timings_of
from pagebus.web.calls.answer_details import AnswerDetails, EmbeddingForm
from pagebus.web.calls.call import Call, Choice
from pagebus.web.http.reply import json_response
from pagebus.web.requests.embeddings import as_bytes, embedding, metadata, parse_embedding, state_of
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel

BYTES = "application/octet-stream"


class Endpoint(ABC):
    """An endpoint: how its bodies are parsed and its answers formed."""

    id_prefix: str
    """The prefix of the ids of its answers."""
    nulls = choice_nulls = null_fields.NONE
    """Null fields of a whole answer, and of each of its choices."""
    object: str
    chunks: type[Chunks]
    detailed_chunks: type[DetailedCompletionChunks | DetailedChatChunks]
    parse: Callable[[dict[str, Any], ServedModel], ParsedRequest]

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """A choice of a whole answer, without its finish fields."""

    @abstractmethod
    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        """Choices, and whatever else belongs into the answer, with what ``details`` asks for."""

    def translated(self, chunks: Chunks, public_id: str, model: str) -> Chunks:
        """Chunks in the endpoint's own shape."""
        return chunks

    def answer(self, call: Call, public_id: str, created_s: int, model: str) -> dict[str, Any]:
        """The whole answer."""
        more = {"metrics": timings_of(call)} if call.tells_times else {}
        if call.details is not None:
            head = {"id": public_id, "object": self.object, "created": created_s, "model": model}
            told = {**head, **self.nulls, **self.detailed(call, call.details)}
            return {**told, "usage": usage_of(call.requests), **more}
        choices = [
            {**self.choice(choice), "logprobs": None, "finish_reason": choice.finish_reason,
             "stop_reason": choice.stop_reason, **self.choice_nulls}
            for choice in call.choices
        ]  # fmt: skip
        head = {"id": public_id, "object": self.object, "created": created_s, "model": model}
        return {**head, **self.nulls, "choices": choices, "usage": usage_of(call.requests), **more}

    def response(self, call: Call, public_id: str, created_s: int, model: str) -> web.Response:
        """The whole answer as an HTTP response."""
        return json_response(self.answer(call, public_id, created_s, model))


class Completion(Endpoint):
    id_prefix = "cmpl-"
    nulls, choice_nulls = null_fields.COMPLETION, null_fields.COMPLETION_CHOICE
    object = "text_completion"
    chunks = CompletionChunks
    detailed_chunks = DetailedCompletionChunks
    parse = staticmethod(parse_completion)

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": choice.take_text()}

    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        return {
            "choices": [completion_choice(index, choice, details) for index, choice in shown_choices(call, details)]
        }


class Chat(Endpoint):
    id_prefix = "chatcmpl-"
    nulls, choice_nulls = null_fields.CHAT, null_fields.CHAT_CHOICE
    object = "chat.completion"
    chunks = ChatChunks
    detailed_chunks = DetailedChatChunks
    parse = staticmethod(parse_chat)

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.take_text(), "refusal": None, **null_fields.MESSAGE}
        return {"index": choice.index, "message": message}

    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        choices = [chat_choice(index, choice, details) for index, choice in shown_choices(call, details)]
        return {"choices": choices, **chat_extras(call, details)}


class Embedding(Endpoint):
    """Whole answers only: there are no chunks."""

    id_prefix = "embd-"
    object = "list"
    parse = staticmethod(parse_embedding)

    def choice(self, choice: Choice) -> dict[str, Any]:
        vector = embedding(state_of(choice.request.prompt), form_of(choice.request.call))
        return {"index": choice.index, "object": "embedding", "embedding": vector}

    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        return {"data": [self.choice(choice) for choice in call.choices]}

    def response(self, call: Call, public_id: str, created_s: int, model: str) -> web.Response:
        form = form_of(call)
        if not form.is_body:
            return super().response(call, public_id, created_s, model)
        body, told = as_bytes(call, form)
        head = {"id": public_id, "created": created_s, "model": model}
        headers = {"metadata": metadata(head, told, usage_of(call.requests))} if form.encoding == "bytes" else {}
        return web.Response(body=body, content_type=BYTES, headers=headers)


def form_of(call: Call) -> EmbeddingForm:
    """The form of a call's embeddings."""
    assert call.details is not None
    assert call.details.embedding is not None
    return call.details.embedding


COMPLETION, CHAT, EMBEDDING = Completion(), Chat(), Embedding()
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDING,
}
"""Endpoints whose bodies may be lines of a batch, by their paths."""


def set_details(call: Call, parsed: ParsedRequest) -> None:
    """Give the call the details that its answer shows."""
    call.show(parsed.details)
    if parsed.details is not None and parsed.truncate_prompt_tokens is None:
        for request, prompt in zip(call.requests, parsed.prompts, strict=True):
            request.prompt_text = prompt.text


def make_chunks(endpoint: Endpoint, parsed: ParsedRequest, public_id: str, created_s: int) -> Chunks:
    """Make the writer of the call's chunks."""
    if parsed.details is None:
        return endpoint.chunks(public_id, created_s, parsed.model, parsed.stream_options)
    return endpoint.detailed_chunks(public_id, created_s, parsed.model, parsed.stream_options, parsed.details)
