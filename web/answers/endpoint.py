"""An endpoint, over HTTP or as jobs: it parses its body and forms its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from aiohttp import web

from pagebus.web.answers import null_fields
from pagebus.web.answers.detailed import DetailedChatChunks, DetailedCompletionChunks
from pagebus.web.answers.sse import Chunks, usage_of
from pagebus.web.answers.timings import timings_of
from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.call import Call, Choice
from pagebus.web.http.reply import json_response
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel


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
