"""``/pause``, ``/resume``, ``/sleep``, ``/wake_up``, ``/reset_prefix_cache`` and ``/server_info``, as in vLLM.

They serve training loops that generate with the model they train. They need an operator's key and act on the whole
deployment.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from pagebus.actors.settings.sources import shown
from pagebus.bus.messages import HOLD_ABORT, HOLD_KEEP, HOLD_WAIT
from pagebus.web.answers.answer_schemas import COUNT, OBJECT, TEXT, array, nullable, record
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Schema
from pagebus.web.http.queries import switch
from pagebus.web.ingress.operations import TAGS
from pagebus.web.routes import About, Route, json_response
from pagebus.web.routes.operate.debug import installed
from pagebus.web.server.context import CONTEXT

MODE: Schema = {"enum": [HOLD_ABORT, HOLD_WAIT, HOLD_KEEP], "default": HOLD_ABORT}
SWITCH: Schema = {"type": "boolean", "default": False}
LEVEL: Schema = {"type": "integer", "minimum": 0, "maximum": 2, "default": 1}
FORMAT: Schema = {"enum": ["text", "json"], "default": "text"}


async def pause(request: web.Request) -> web.Response:
    """Stop computing, until `/resume`.

    Requests that are under way are ended (`mode=abort`), come to their end (`wait`) or stand still (`keep`). But for
    the last, new ones get a 503, and the caches are emptied (`clear_cache`). Jobs stand still in any case.
    """
    query = _query(request, "mode", "clear_cache")
    resets = switch(query, "clear_cache", default=True)
    await request.app[CONTEXT].operations.hold(_choice(query, "mode", MODE), resets=resets)
    return json_response({"status": "paused"})


async def resume(request: web.Request) -> web.Response:
    """Resume the work after `/pause`."""
    _query(request)
    await request.app[CONTEXT].operations.let_go()
    return json_response({"status": "resumed"})


async def is_paused(request: web.Request) -> web.Response:
    """Whether the work is paused."""
    _query(request)
    return json_response({"is_paused": bool(await request.app[CONTEXT].operations.mode())})


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Empty the prefix cache.

    With `reset_external` nothing in host memory either; with `reset_running_requests` what runs is computed anew.
    """
    query = _query(request, "reset_running_requests", "reset_external")
    host, running = switch(query, "reset_external"), switch(query, "reset_running_requests")
    await request.app[CONTEXT].operations.reset_caches(host=host, running=running)
    return json_response({"success": True})


async def sleep(request: web.Request) -> web.Response:
    """Pause (`mode`), then have executors release their memory, until `/wake_up`.

    `level` 1 and 2 are the same: weights and cache go, and weights are read again. Level 0 is a pause.
    """
    query = _query(request, "level", "mode")
    level = query.get("level", "1")
    if level not in ("0", "1", "2"):
        raise bad_field("level", "must be 0, 1 or 2")
    await request.app[CONTEXT].operations.sleep(int(level), _choice(query, "mode", MODE))
    return json_response({"status": "sleeping", "level": int(level)})


async def wake_up(request: web.Request) -> web.Response:
    """Have executors load the model again, and resume the work.

    With `tags` (`weights`, `kv_cache`) once both have been named.
    """
    _query(request, "tags")
    tags = request.query.getall("tags", [])
    for tag in tags:
        if tag not in TAGS:
            raise bad_field("tags", f"must be among {', '.join(TAGS)}")
    awake = await request.app[CONTEXT].operations.wake(tags)
    return json_response({"status": "awake" if awake else "sleeping", "tags": tags or None})


async def is_sleeping(request: web.Request) -> web.Response:
    """Whether executors sleep."""
    _query(request)
    return json_response({"is_sleeping": await request.app[CONTEXT].operations.is_asleep()})


async def server_info(request: web.Request) -> web.Response:
    """Settings without secrets, and what is installed. `config_format`: `text` or `json`."""
    context = request.app[CONTEXT]
    form = _choice(_query(request, "config_format"), "config_format", FORMAT)
    settings: Any = shown(context.settings)
    if form == "text":
        settings = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    system = {"python_version": platform.python_version(), "os": platform.platform(), **installed()}
    return json_response({"vllm_config": settings, "vllm_env": {}, "system_env": system})


def _query(request: web.Request, *names: str) -> Mapping[str, str]:
    """The query parameters, all of which must be among ``names``.

    Raises:
        ApiError: 400, there is another one.
    """
    for name in request.query:
        if name not in names:
            raise bad_field(name, "unknown parameter", code="unknown_parameter")
    return request.query


def _choice(query: Mapping[str, str], name: str, schema: Schema) -> str:
    value = query.get(name, schema["default"])
    if value not in schema["enum"]:
        raise bad_field(name, f"must be one of {', '.join(schema['enum'])}")
    return str(value)


_YES_NO: Schema = {"type": "boolean"}
_TAGS: Schema = {"type": "array", "items": {"enum": list(TAGS)}}
_PAUSE = {"mode": MODE, "clear_cache": {**SWITCH, "default": True}}
_RESET = {"reset_running_requests": SWITCH, "reset_external": SWITCH}


def _about(query: Mapping[str, Schema] | None = None, answer: Schema = OBJECT) -> About:
    return About(tag="Operation", query=query or {}, answer=answer)


_WOKEN = record(status=TEXT, tags=nullable(array(TEXT)))
_SLEEPING = record(status=TEXT, level=COUNT)
ROUTES = (
    Route("POST", "/pause", "pause", pause, _about(_PAUSE, record(status=TEXT))),
    Route("POST", "/resume", "resume", resume, _about(answer=record(status=TEXT))),
    Route("GET", "/is_paused", "is_paused", is_paused, _about(answer=record(is_paused=_YES_NO))),
    Route("POST", "/reset_prefix_cache", "reset_prefix_cache", reset_prefix_cache,
          _about(_RESET, record(success=_YES_NO))),
    Route("POST", "/sleep", "sleep", sleep, _about({"level": LEVEL, "mode": MODE}, _SLEEPING)),
    Route("POST", "/wake_up", "wake_up", wake_up, _about({"tags": _TAGS}, _WOKEN)),
    Route("GET", "/is_sleeping", "is_sleeping", is_sleeping, _about(answer=record(is_sleeping=_YES_NO))),
    Route("GET", "/server_info", "server_info", server_info, _about({"config_format": FORMAT})),
)  # fmt: skip
