"""Describes all routes in OpenAPI 3.1: paths and methods come from the route table, bodies from their parsers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pagebus.web.access.auth import OPEN_ROUTES
from pagebus.web.answers.answer_schemas import ERROR, STATUS
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import JSON, About, Route
from pagebus.web.routes.body_schema import body_schema

SUMMARY = (
    "OpenAI's API over Pagebus. Any field of a body that is not described is answered with a 400 that names it; "
    "docs/compatibility/fields.md says how fields differ from those of other servers."
)
_PARAMETER = re.compile(r"\{(\w+)(?::[^}]*)?\}")
_ERRORS: dict[str, str] = {
    "4XX": "Something is wrong with the request, or (429) there is no room for it; `error` says what.",
    "5XX": "The server cannot answer now (503, with Retry-After), or has failed (500).",
}


def describe(routes: Iterable[Route], model: ServedModel, version: str, *, root: str = "") -> dict[str, Any]:
    """The whole document. ``root``: the path below which the server is shown."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagebus", "version": version, "summary": SUMMARY},
        **({"servers": [{"url": root}]} if root else {}),
        "paths": paths,
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": ERROR, "Status": STATUS},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Route, model: ServedModel) -> dict[str, Any]:
    about = route.about
    summary, _, details = (route.handler.__doc__ or route.name).strip().partition("\n")
    operation: dict[str, Any] = {
        "operationId": f"{route.name}_{route.method.lower()}",
        "summary": summary,
        "tags": [about.tag],
        "responses": _answers(route),
    }
    if details.strip():
        operation["description"] = " ".join(details.split())
    if parameters := _parameters(route.path, about):
        operation["parameters"] = parameters
    if body := _body(about, model):
        operation["requestBody"] = {"required": True, "content": {about.body_type: body}}
    if route.name in OPEN_ROUTES:
        operation["security"] = []
    return operation


def _parameters(path: str, about: About) -> Sequence[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(path)
    ]
    given = (("query", about.query), ("header", about.headers))
    return in_path + [
        {"name": name, "in": place, "schema": schema} for place, schemas in given for name, schema in schemas.items()
    ]


def _body(about: About, model: ServedModel) -> dict[str, Any]:
    forms = [each for each in (about, *about.forms) if each.parse is not None]
    if not forms:
        return {} if about.body is None else {"schema": about.body}
    schemas = [body_schema(each.parse, list(each.examples.values()), model) for each in forms if each.parse]
    examples: dict[str, Any] = {}
    for name, example in (pair for each in forms for pair in each.examples.items()):
        examples[f"{name} {len(examples) + 1}" if name in examples else name] = {"value": example}
    return {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, "examples": examples}


def _answers(route: Route) -> dict[str, Any]:
    about = route.about
    content = {kind: {"schema": about.answer} if kind == JSON else {} for kind in about.answer_types}
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status, text in _ERRORS.items():
        answers[status] = {"description": text, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    if about.answer == STATUS:  # says so in its own way
        answers["503"] = {"description": "Not now; the answer says why.", "content": content}
    return answers
