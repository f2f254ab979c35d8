"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API, translated onto chats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiohttp import web

from pagebus.web.adapters.field_names import MESSAGE_NAMES
from pagebus.web.adapters.messages import MessageEvents, message_of, read_count, read_message
from pagebus.web.adapters.translated import TranslatedChunks, named
from pagebus.web.answers.answer_schemas import COUNT, OBJECT, TEXT, array, record
from pagebus.web.answers.endpoints import Chat
from pagebus.web.answers.sse import Chunks
from pagebus.web.calls.call import Call
from pagebus.web.http.anthropic import error_body
from pagebus.web.http.errors import ApiError
from pagebus.web.http.fields import translated
from pagebus.web.requests.openai import parse_chat, parse_prompt
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import EVENTS, JSON, About, Route, json_response
from pagebus.web.routes.generate import examples
from pagebus.web.routes.generate.generation import generate
from pagebus.web.routes.generate.tokens import ask_tokenizer
from pagebus.web.server.context import CONTEXT


def parse_message(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /v1/messages``."""
    chat = read_message(data, allow_unknown=model.allow_unknown_fields)
    with translated(MESSAGE_NAMES):
        return replace(parse_chat(chat, model), names=MESSAGE_NAMES)


def parse_count(data: dict[str, Any], model: ServedModel) -> ParsedRequest:
    """The body of ``POST /v1/messages/count_tokens``."""
    chat = read_count(data, allow_unknown=model.allow_unknown_fields)
    with translated(MESSAGE_NAMES):
        return replace(parse_prompt(chat, model), names=MESSAGE_NAMES)


class Messages(Chat):
    """A chat whose answer is a message."""

    id_prefix = "msg_"
    parse = staticmethod(parse_message)

    def answer(self, call: Call, public_id: str, created_s: int, model: str) -> dict[str, Any]:
        return message_of(super().answer(call, public_id, created_s, model))

    def translated(self, chunks: Chunks, public_id: str, model: str) -> Chunks:
        return TranslatedChunks(chunks, MessageEvents(public_id, model), error_event)


MESSAGES = Messages()


def error_event(error: ApiError) -> bytes:
    return named(error_body(error))


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, in Anthropic's shape.

    With `stream`, as its named events, from `message_start` to `message_stop`.
    """
    return await generate(request, lambda _: MESSAGES)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a conversation."""
    context = request.app[CONTEXT]
    context.check_ready()
    parsed = await context.bodies.read_as(request, lambda data: parse_count(data, context.model))
    prompt, _ = await ask_tokenizer(request, parsed)
    return json_response({"input_tokens": len(prompt.tokens)})


MESSAGE = record(id=TEXT, type={"const": "message"}, role={"const": "assistant"}, content=array(OBJECT), model=TEXT,
                 usage=record(input_tokens=COUNT, output_tokens=COUNT))  # fmt: skip
ROUTES = (
    Route("POST", "/v1/messages", "messages", messages,
          About(tag="Messages", parse=parse_message, examples=examples.MESSAGES, answer=MESSAGE,
                answer_types=(JSON, EVENTS))),
    Route("POST", "/v1/messages/count_tokens", "messages_count_tokens", count_tokens,
          About(tag="Messages", parse=parse_count, examples=examples.COUNTED,
                answer=record(input_tokens=COUNT))),
)  # fmt: skip
