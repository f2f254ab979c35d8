"""What ``/openapi.json`` names of bodies is what the routes take, as they answer over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from pagebus.web.answers.answer_schemas import OBJECT
from pagebus.web.app import ROUTES
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields, translated
from pagebus.web.routes import JSON, Route
from pagebus.web.routes.body_schema import body_schema
from pagebus.web.routes.openapi import describe
from tests.vllm_names import fields_of as vllm_fields
from tests.web.fake_backend import MODEL

DOCUMENT = describe(ROUTES, MODEL, "1.2.3")
BODIES = [route for route in ROUTES if route.about.parse or route.about.forms]
WITHIN = {
    "/inference/v1/generate": "sampling_params",
    "/v1/chat/completions/derender": "chat_request",
    "/v1/completions/derender": "completion_request",
}
"""Objects whose fields are those of another route."""
Body = dict[str, Any]


def schema_of(route: Route) -> Mapping[str, Any]:
    content = DOCUMENT["paths"][route.path]["post"]["requestBody"]["content"]
    schema: Mapping[str, Any] = content[JSON]["schema"]
    return schema


def described(route: Route, within: str) -> dict[str, Any]:
    """The fields of a body, or of an object within it, in any of its forms."""
    forms = schema_of(route).get("anyOf", [schema_of(route)])
    found = [form["properties"][within] if within else form for form in forms]
    return {name: schema for form in found for name, schema in form["properties"].items()}


def examples_of(route: Route, within: str) -> Iterator[Body]:
    for about in (route.about, *route.about.forms):
        for example in about.examples.values():
            if not within or within in example:
                yield dict(example)


KNOWN = {name for route in BODIES for name in described(route, "")} | set(vllm_fields("POST /v1/chat/completions"))
CASES = [(route, "") for route in BODIES] + [(route, WITHIN[route.path]) for route in BODIES if route.path in WITHIN]


@pytest.mark.parametrize(("route", "within"), CASES, ids=[f"{route.path} {within}" for route, within in CASES])
async def test_fields_that_are_described_are_those_that_are_taken(serve, http, tmp_path, route, within):
    """Each is known in a body of some form, and no other is: also none of which no value would be served."""
    served = await serve(files_dir=str(tmp_path), sagemaker_session_s=60.0)
    fields = described(route, within)
    assert fields

    async def refusal(body: Body, name: str) -> str:
        """Why a body with this field is refused, if the field is to blame."""
        changed = {**body, within: {**body[within], name: ["odd"]}} if within else {**body, name: ["odd"]}
        async with http.post(served.url + route.path, json=changed) as response:
            error = (await response.json()).get("error") if response.status == 400 else None
        is_it = error is not None and error["param"] == (f"{within}.{name}" if within else name)
        return error["reason"] if is_it else ""

    examples = list(examples_of(route, within))
    for name in sorted(KNOWN | fields.keys() | {"nonsense"}):
        for example in examples:
            why = await refusal(example, name)
            if name not in fields:
                assert why in ("unknown_parameter", "unsupported_parameter"), name
            elif why != "unknown_parameter":
                break  # one form that takes it is enough
        else:
            assert name not in fields, f"no form takes {name}"


def test_no_body_is_without_fields() -> None:
    """No route takes any object whatever."""
    bodies = [operation.get("requestBody") for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert OBJECT not in [body["content"][JSON]["schema"] for body in bodies if body and JSON in body["content"]]


@pytest.mark.parametrize("route", BODIES, ids=lambda route: route.path)
def test_examples_of_every_form_are_valid(route):
    """What is shown as an example is understood."""
    for about in (route.about, *route.about.forms):
        for example in about.examples.values():
            about.parse(dict(example), MODEL)


def test_a_body_that_is_translated() -> None:
    """Fields that are handed on are described by who reads them, under the names of the client; what is looked into, or
    has a schema of its own, is not."""

    def inner(data: Body) -> None:
        fields = Fields(data)
        fields.number("heat", None, 0, 2)
        words = Fields(fields.object("words") or {}, "words")
        words.string("first", None)
        words.finish({})
        for index, turn in enumerate(fields.array("turns", max_items=5) or []):
            Fields(turn, f"turns[{index}]").boolean("loud", False)
        fields.take("own", {"type": "boolean"})
        fields.finish({"later": (1,)})

    def parse(data: Body, model: object) -> None:
        fields = Fields(data)
        body = {"heat": fields.take("warmth"), "words": fields.object("words")}
        fields.take("own", {"enum": ["x"]})
        turns = fields.array("turns", max_items=3) or []
        for index, turn in enumerate(turns):
            if Fields(turn, f"turns[{index}]").take("text") is None:
                raise bad_field(f"turns[{index}].text", "is required")
        fields.finish({})
        with translated(((r"heat\b", "warmth"),)):
            inner({**body, "turns": [{} for _ in turns]})

    text = {"type": "string", "maxLength": 256}
    assert body_schema(parse, [{"warmth": 1, "words": {"first": "x"}, "turns": [{"text": "x"}]}], MODEL) == {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "properties": {
            "warmth": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
            "words": {
                "type": ["object", "null"], "additionalProperties": {"type": "null"},
                "properties": {"first": {**text, "type": ["string", "null"]}},
            },
            "own": {"enum": ["x", None]},
            "turns": {
                "type": ["array", "null"], "maxItems": 3,
                "items": {"type": "object", "properties": {"text": {}}, "required": ["text"]},
            },
        },
    }  # fmt: skip


def test_a_field_that_an_example_does_without_is_not_required() -> None:
    """Whether it is may depend on others."""

    def parse(data: Body, model: object) -> None:
        for index, part in enumerate(Fields(data).array("parts", max_items=3) or []):
            fields = Fields(part, f"parts[{index}]")
            kind, size = fields.take("kind"), fields.take("size")
            if kind == "large" and size is None:
                raise bad_field(f"parts[{index}].size", "is required")

    parts = [{"kind": "large", "size": 9}, {"kind": "small"}]
    schema = body_schema(parse, [{"parts": parts}], MODEL)
    assert "required" not in schema["properties"]["parts"]["items"]
