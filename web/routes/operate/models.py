"""``GET /v1/models`` and ``GET /v1/models/{id}``: in OpenAI's form, and for Anthropic's clients in theirs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from pagebus.web.answers.answer_schemas import ANTHROPIC_MODEL, ANTHROPIC_MODELS, MODEL, MODELS, TEXT
from pagebus.web.http.anthropic import VERSION_HEADER, is_anthropics
from pagebus.web.http.errors import bad_field, model_not_found
from pagebus.web.http.queries import limit_of
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route, json_response
from pagebus.web.server.context import CONTEXT

DEFAULT_PAGE, MAX_PAGE = 20, 1000
"""Models of a page for Anthropic's clients."""


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


def anthropic_card(model: ServedModel, name: str) -> dict[str, Any]:
    """One name of the model, or of an adapter, as Anthropic shows it."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def anthropic_page(cards: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A part of a list, as Anthropic's clients page through it: in either direction."""
    limit, ids = limit_of(query, DEFAULT_PAGE, MAX_PAGE), [each["id"] for each in cards]
    for name in {"before_id", "after_id"} & query.keys():
        if query[name] not in ids:
            raise bad_field(name, "must be the id of a model")
    if "before_id" in query:
        cards = cards[: ids.index(query["before_id"])]
        shown = cards[-limit:]
    else:
        cards = cards[ids.index(query["after_id"]) + 1 :] if "after_id" in query else cards
        shown = cards[:limit]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"data": shown, "has_more": len(cards) > limit, "first_id": first, "last_id": last}


async def list_models(request: web.Request) -> web.Response:
    """The names of the model that is served, and its adapters.

    Clients with the header `anthropic-version` get them in Anthropic's form, and page by page.
    """
    model = request.app[CONTEXT].model
    if is_anthropics(request):
        cards = [anthropic_card(model, name) for name in (*model.names, *model.adapters)]
        return json_response(anthropic_page(cards, request.query))
    return json_response({"object": "list", "data": [card(model, name) for name in (*model.names, *model.adapters)]})


async def show_model(request: web.Request) -> web.Response:
    """One name of the model. Names may hold slashes, as hub ids do."""
    model, name = request.app[CONTEXT].model, request.match_info["id"]
    if not model.knows(name):
        raise model_not_found(name)
    return json_response((anthropic_card if is_anthropics(request) else card)(model, name))


_HEADERS = {VERSION_HEADER: TEXT}
ROUTES = (
    Route("GET", "/v1/models", "models", list_models,
          About(tag="Models", answer={"anyOf": [MODELS, ANTHROPIC_MODELS]}, headers=_HEADERS,
                query={"limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}, "after_id": TEXT,
                       "before_id": TEXT})),
    Route("GET", "/v1/models/{id:.+}", "model", show_model,
          About(tag="Models", answer={"anyOf": [MODEL, ANTHROPIC_MODEL]}, headers=_HEADERS)),
)  # fmt: skip
