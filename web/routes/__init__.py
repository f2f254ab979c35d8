"""The table of routes, one module per family, and their description in OpenAPI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pagebus.web.http.fields import Schema
from pagebus.web.http.reply import json_response
from pagebus.web.routes.body_schema import Parser

__all__ = ["EVENTS", "JSON", "About", "Handler", "Route", "json_response"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What ``/openapi.json`` says of a route besides its path and the first line of its handler's docstring."""

    tag: str = "Service"
    parse: Parser | None = None
    """What reads the body, if there is one; its schema is made by running it over ``examples``."""
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Valid bodies by name, which between them use every object that a body can hold."""
    forms: tuple[About, ...] = ()
    """Of a body that has several forms: ``parse`` and ``examples`` of each."""
    body: Schema | None = None
    """The schema of a body that is no JSON, with ``body_type``."""
    body_type: str = JSON
    query: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, Schema] = field(default_factory=dict)
    """Parameters that may be given."""
    answer: Schema = field(default_factory=dict)
    """The schema of a 200."""
    answer_types: tuple[str, ...] = (JSON,)


@dataclass(frozen=True, slots=True)
class Route:
    """``name`` is what :mod:`pagebus.web.access.auth` knows a route by."""

    method: str
    path: str
    name: str
    handler: Handler
    about: About = About()
