"""``POST /invocations``, SageMaker's single route: the body decides which endpoint serves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aiohttp import web

from pagebus.web.access.auth import API_KEY
from pagebus.web.access.sagemaker import NEW_SESSION, SESSION, SessionAsked, parse_session
from pagebus.web.answers.answer_schemas import OBJECT
from pagebus.web.answers.endpoint import Endpoint
from pagebus.web.answers.endpoints import CHAT, COMPLETION
from pagebus.web.answers.pooled import CLASSIFY, EMBEDDING, RERANK, SCORE
from pagebus.web.http.errors import bad_field
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import EVENTS, JSON, About, Route
from pagebus.web.routes.generate.embeddings import EMBEDDINGS_ABOUT
from pagebus.web.routes.generate.generation import CHATS_ABOUT, COMPLETIONS_ABOUT, generate
from pagebus.web.routes.generate.scores import RERANKS_ABOUT, SCORES_ABOUT
from pagebus.web.server.context import CONTEXT

ENDPOINTS: dict[str, Endpoint] = {
    "messages": CHAT, "prompt": COMPLETION, "input": EMBEDDING, "text_1": SCORE, "queries": SCORE, "data_1": SCORE,
    "query": RERANK,
}  # fmt: skip
"""Endpoints by the field that only their bodies have."""


def endpoint_of(data: dict[str, Any]) -> Endpoint:
    """The endpoint of a body.

    Raises:
        ApiError: 400, nobody's.
        SessionAsked: it opens or closes a session.
    """
    if data.get("requestType") is not None:
        raise SessionAsked(data)
    for field, endpoint in ENDPOINTS.items():
        if data.get(field) is not None:
            return endpoint
    first, *others = ENDPOINTS
    raise bad_field(first, f"is missing, and so are {' and '.join(f'`{each}`' for each in others)}; give one of them")


def served_endpoint(data: dict[str, Any], model: ServedModel) -> Endpoint:
    """The endpoint of a body, of those with the same body the one that the model serves."""
    endpoint, pooler = endpoint_of(data), model.pooler
    return CLASSIFY if endpoint is EMBEDDING and pooler is not None and pooler.classifies else endpoint


async def invocations(request: web.Request) -> web.StreamResponse:
    """Answer as the endpoint that the body belongs to: the one with `messages`, `prompt`, `input`, `text_1` or `query`.

    That is a body of `/v1/chat/completions`, `/v1/completions`, `/v1/embeddings` (`/classify`, if the model does),
    `/v1/score` or `/v1/rerank`.
    """
    model = request.app[CONTEXT].model
    sessions, client = request.app[CONTEXT].sessions, request[API_KEY].name
    session_id = request.headers.get(SESSION)
    try:
        return await generate(
            request, lambda data: served_endpoint(data, model), before=lambda: sessions.check(session_id, client)
        )
    except SessionAsked as asked:
        return await sessions.answer(asked.data, session_id, client)


def _form(about: About, endpoint: Endpoint) -> About:
    """The bodies of a route that go to its endpoint from here, too."""
    here = {name: body for name, body in about.examples.items() if endpoint_of(dict(body)) is endpoint}
    return replace(about, examples=here)


FORMS = (
    _form(CHATS_ABOUT, CHAT), _form(COMPLETIONS_ABOUT, COMPLETION), _form(EMBEDDINGS_ABOUT, EMBEDDING),
    _form(SCORES_ABOUT, SCORE), _form(RERANKS_ABOUT, RERANK),
    About(parse=lambda data, _: parse_session(data), examples={"session": {"requestType": NEW_SESSION}}),
)  # fmt: skip
ROUTES = (
    Route("POST", "/invocations", "invocations", invocations,
          About(tag="Generation", forms=FORMS, answer=OBJECT, answer_types=(JSON, EVENTS))),
)  # fmt: skip
