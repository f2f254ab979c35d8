"""``POST /inference/v1/generate``: tokens in, tokens out, for clients that tokenize themselves."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagebus.web.adapters.tokens import TokenChunks, token_choice, whole
from pagebus.web.answers.answer_schemas import COUNT, OBJECT, TEXT, TIME, USAGE, array, nullable, record
from pagebus.web.answers.endpoint import Endpoint
from pagebus.web.answers.resume import RESUMPTION_HEADERS
from pagebus.web.calls.answer_details import AnswerDetails
from pagebus.web.calls.call import Call, Choice
from pagebus.web.requests.token_body import parse_generate
from pagebus.web.routes import EVENTS, JSON, About, Route
from pagebus.web.routes.generate import examples
from pagebus.web.routes.generate.generation import generate
from pagebus.web.routes.operate.aborts import EXAMPLES, abort_requests, parse_abort


class Tokens(Endpoint):
    """A completion that returns token ids and no text."""

    id_prefix = "generate-tokens-"
    object = "tokens"
    chunks = TokenChunks
    detailed_chunks = TokenChunks
    parse = staticmethod(parse_generate)

    def choice(self, choice: Choice) -> dict[str, Any]:
        assert choice.request.call.details is not None
        return token_choice(choice.index, choice, choice.request.call.details)

    def detailed(self, call: Call, details: AnswerDetails) -> dict[str, Any]:
        return {"choices": [self.choice(choice) for choice in call.choices]}

    def answer(self, call: Call, public_id: str, created_s: int, model: str) -> dict[str, Any]:
        assert call.details is not None  # it asks for token ids
        return whole(call, call.details, public_id, created_s, model)


TOKENS = Tokens()


async def generate_tokens(request: web.Request) -> web.StreamResponse:
    """Generate token ids from token ids.

    `sampling_params` are the fields of a completion; without `max_tokens` the context is filled.
    """
    return await generate(request, lambda _: TOKENS)


_CHOICE = record(
    index=COUNT, token_ids=array(COUNT), logprobs=nullable(OBJECT), finish_reason=nullable(TEXT),
    stop_reason={"type": ["string", "integer", "null"]},
)  # fmt: skip
ANSWER = record(
    request_id=TEXT, model=TEXT, created=TIME, output_mode={"const": "tokens"}, choices=array(_CHOICE), usage=USAGE,
    prompt_token_ids=nullable(array(COUNT)),
)  # fmt: skip
ROUTES = (
    Route("POST", "/inference/v1/generate", "inference_generate", generate_tokens,
          About(tag="Tokens", parse=parse_generate, examples=examples.GENERATED, headers=RESUMPTION_HEADERS,
                answer=ANSWER, answer_types=(JSON, EVENTS))),
    Route("POST", "/inference/v1/abort_requests", "inference_abort", abort_requests,
          About(tag="Tokens", parse=parse_abort, examples=EXAMPLES,
                answer=record(status={"const": "aborted"}, aborted=COUNT))),
)  # fmt: skip
