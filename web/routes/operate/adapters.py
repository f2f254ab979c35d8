"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, as in vLLM; they need an operator's key."""

from __future__ import annotations

from typing import Any, NamedTuple

from aiohttp import web

from pagebus.web.http.errors import ApiError
from pagebus.web.http.fields import Fields
from pagebus.web.http.limits import MAX_NAME_CHARS
from pagebus.web.requests.openai import parse_json
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route
from pagebus.web.server.context import CONTEXT

MAX_PATH_CHARS = 4096


class Wanted(NamedTuple):
    """What is to be loaded."""

    name: str
    path: str
    in_place: bool


def parse_load(data: dict[str, Any], model: ServedModel) -> Wanted:
    """The body of ``/v1/load_lora_adapter``."""
    fields = Fields(data)
    name = fields.string("lora_name", None, max_chars=MAX_NAME_CHARS)
    path = fields.string("lora_path", None, max_chars=MAX_PATH_CHARS)
    in_place = fields.boolean("load_inplace", False)
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    if not name or not path:
        missing = "lora_path" if name else "lora_name"
        raise _missing(missing, "Both 'lora_name' and 'lora_path' must be provided.")
    return Wanted(name, path, in_place)


def parse_unload(data: dict[str, Any], model: ServedModel) -> str:
    """The name in the body of ``/v1/unload_lora_adapter``."""
    fields = Fields(data)
    name = fields.string("lora_name", None, max_chars=MAX_NAME_CHARS)
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    if not name:
        raise _missing("lora_name", "'lora_name' needs to be provided to unload a LoRA adapter.")
    return name


async def load_lora_adapter(request: web.Request) -> web.Response:
    """Let clients name an adapter.

    The folder at `lora_path` is read and checked. With `load_inplace` the name may have another already: requests
    under way end with that one.
    """
    context = request.app[CONTEXT]
    wanted = parse_load(parse_json(await context.bodies.read(request)), context.model)
    await context.adapters.load(wanted.name, wanted.path, in_place=wanted.in_place)
    return web.Response(text=f"Success: LoRA adapter '{wanted.name}' added successfully.")


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Let clients name an adapter no more. Requests under way end with it."""
    context = request.app[CONTEXT]
    name = parse_unload(parse_json(await context.bodies.read(request)), context.model)
    await context.adapters.unload(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def _missing(field: str, text: str) -> ApiError:
    return ApiError(400, text, type="InvalidUserInput", param=field)


_LOAD: dict[str, dict[str, Any]] = {
    "one": {"lora_name": "sql", "lora_path": "/adapters/sql"},
    "again": {"lora_name": "sql", "lora_path": "/adapters/sql", "load_inplace": True},
}
ROUTES = (
    Route("POST", "/v1/load_lora_adapter", "load_lora_adapter", load_lora_adapter,
          About(tag="Models", parse=parse_load, examples=_LOAD, answer={"type": "string"},
                answer_types=("text/plain",))),
    Route("POST", "/v1/unload_lora_adapter", "unload_lora_adapter", unload_lora_adapter,
          About(tag="Models", parse=parse_unload, examples={"one": {"lora_name": "sql"}}, answer={"type": "string"},
                answer_types=("text/plain",))),
)  # fmt: skip
