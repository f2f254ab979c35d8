"""Endpoints that generate tokens, and those whose bodies may be lines of a batch."""

from __future__ import annotations

from typing import Any

from pagebus.web.answers import null_fields
from pagebus.web.answers.detailed import (
    DetailedChatChunks,
    DetailedCompletionChunks,
    chat_choice,
    chat_extras,
    completion_choice,
    shown_choices,
)
from pagebus.web.answers.endpoint import Endpoint
from pagebus.web.answers.pooled import CLASSIFY, EMBEDDING, POOLING, RERANK, SCORE
from pagebus.web.answers.sse import ChatChunks, Chunks, CompletionChunks
from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.call import Call, Choice
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.requests.parsed_request import ParsedRequest

SCORE_PATHS, RERANK_PATHS = ("/v1/score", "/score"), ("/v1/rerank", "/rerank", "/v2/rerank")


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


COMPLETION, CHAT = Completion(), Chat()
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": EMBEDDING,
    **dict.fromkeys(SCORE_PATHS, SCORE),
    **dict.fromkeys(RERANK_PATHS, RERANK),
    "/classify": CLASSIFY,
    "/pooling": POOLING,
}
"""Endpoints whose bodies may be lines of a batch, by their paths."""


def set_details(call: Call, parsed: ParsedRequest) -> None:
    """Give the call the details that its answer shows."""
    call.show(parsed.details)
    if parsed.details is not None and parsed.truncate_prompt_tokens is None:
        for request, prompt in zip(call.requests, parsed.prompts, strict=True):
            request.show_prompt_text(prompt.text)


def make_chunks(endpoint: Endpoint, parsed: ParsedRequest, public_id: str, created_s: int) -> Chunks:
    """Make the writer of the call's chunks."""
    if parsed.details is None:
        return endpoint.chunks(public_id, created_s, parsed.model, parsed.stream_options)
    return endpoint.detailed_chunks(public_id, created_s, parsed.model, parsed.stream_options, parsed.details)
