"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagebus.web.answers.answer_schemas import MODEL, MODELS
from pagebus.web.http.errors import model_not_found
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route, json_response
from pagebus.web.server.context import CONTEXT


def card(model: ServedModel, name: str) -> dict[str, Any]:
    """One name of the model, or of an adapter, as OpenAI and vLLM show it."""
    adapter = model.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "pagebus",
        "root": model.name if adapter is None else adapter.path,
        "parent": None if adapter is None else model.name,
        "max_model_len": model.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    """The names of the model that is served, and its adapters."""
    model = request.app[CONTEXT].model
    return json_response({"object": "list", "data": [card(model, name) for name in (*model.names, *model.adapters)]})


async def show_model(request: web.Request) -> web.Response:
    """One name of the model. Names may hold slashes, as hub ids do."""
    model, name = request.app[CONTEXT].model, request.match_info["id"]
    if not model.knows(name):
        raise model_not_found(name)
    return json_response(card(model, name))


ROUTES = (
    Route("GET", "/v1/models", "models", list_models, About(tag="Models", answer=MODELS)),
    Route("GET", "/v1/models/{id:.+}", "model", show_model, About(tag="Models", answer=MODEL)),
)
