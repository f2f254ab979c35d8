"""``/debug/state``: the state of a deployment for support, as one document that can be passed on."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from pagebus.actors.settings.sources import shown
from pagebus.web.answers.answer_schemas import OBJECT
from pagebus.web.routes import About, Route, json_response
from pagebus.web.server.context import CONTEXT

PACKAGES = ("aiohttp", "llguidance", "numpy", "orjson", "redis", "tokenizers", "torch", "transformers", "triton")


async def state(request: web.Request) -> web.Response:
    """Versions, settings without secrets, actors, lengths of streams, the scheduler's picture."""
    context = request.app[CONTEXT]
    told = {
        "at_s": time.time(),
        "versions": {"pagebus": context.version, "python": platform.python_version(), **installed()},
        "platform": platform.platform(),
        "model": {"name": context.model.name, "max_model_len": context.model.max_model_len},
        "settings": shown(context.settings),
        "missing": context.missing(),
        "bus_trouble": context.bus_trouble(),
        "ingress": {
            "address": context.address,
            "open_requests": context.inbox.num_open,
            "open_tokens": context.admission.open_tokens,
        },
        **await context.observatory.report(),
    }
    return json_response(told)


def installed() -> dict[str, str]:
    """Versions of the relevant installed packages."""
    return {name: found for name in PACKAGES if (found := _version(name)) is not None}


def _version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


ROUTES = (Route("GET", "/debug/state", "debug_state", state, About(tag="Observation", answer=OBJECT)),)
