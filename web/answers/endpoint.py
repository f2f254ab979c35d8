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
        head = {"id": public_id, "object": self.object, "created": created_s, "model": model}
        content = self._plain(call) if call.details is None else self.detailed(call, call.details)
        timings = {"metrics": timings_of(call)} if call.tells_times else {}
        return {**head, **self.nulls, **content, "usage": usage_of(call.requests), **timings}

    def _plain(self, call: Call) -> dict[str, Any]:
        """The choices of an answer without details."""
        choices = [
            {**self.choice(choice), "logprobs": None, "finish_reason": choice.finish_reason,
             "stop_reason": choice.stop_reason, **self.choice_nulls}
            for choice in call.choices
        ]  # fmt: skip
        return {"choices": choices}

    def response(self, call: Call, public_id: str, created_s: int, model: str) -> web.Response:
        """The whole answer as an HTTP response."""
        return json_response(self.answer(call, public_id, created_s, model))
