"""The description of the API: it covers every route, comes from the parsers, and shows on a page of its own."""

from __future__ import annotations

import json
import re

import pytest

from pagebus.web.app import ROUTES
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import LISTENER, Fields
from pagebus.web.requests.openai import parse_chat, parse_completion
from pagebus.web.routes.body_schema import body_schema
from pagebus.web.routes.openapi import describe
from tests.web.fake_backend import MODEL

DOCUMENT = describe(ROUTES, MODEL, "1.2.3")


def body_of(path: str) -> dict[str, object]:
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_every_route_is_described():
    """With its method, a sentence, and what it answers; ids of operations are unique."""
    operations = [operation for methods in DOCUMENT["paths"].values() for operation in methods.values()]

    assert len(operations) == len(ROUTES)
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES)
    assert all(operation["summary"] and operation["responses"]["200"] for operation in operations)
    assert [path for path in DOCUMENT["paths"] if re.search(r"\{[^}]*[^\w}][^}]*\}", path)] == []
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


@pytest.mark.parametrize("route", [route for route in ROUTES if route.about.parse], ids=lambda route: route.name)
def test_examples_are_valid(route):
    """What the page shows as an example is understood."""
    for example in route.about.examples.values():
        route.about.parse(dict(example), MODEL)


def test_ranges_are_those_that_are_checked():
    """Types, bounds, defaults and neutral values of fields; what may be left out may be null."""
    fields = body_of("/v1/completions")["properties"]

    assert fields["temperature"] == {"type": ["number", "null"], "minimum": 0, "maximum": 2, "default": 1.0}
    assert fields["n"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 64, "default": 1}
    assert fields["max_tokens"]["minimum"] == 0  # with echo
    assert fields["model"] == {"enum": ["fake-model", "alias", None]}
    assert fields["vllm_xargs"] == {"enum": [{}, None]}
    assert fields["stop_token_ids"]["items"] == {"type": "integer", "minimum": 0, "maximum": MODEL.vocab_size - 1}
    assert "prompt_embeds" not in fields


def test_nested_objects():
    """Objects within objects and lists have their own fields."""
    message = body_of("/v1/chat/completions")["properties"]["messages"]["items"]

    assert message["required"] == ["role"]
    assert message["additionalProperties"] == {"type": "null"}
    assert message["properties"]["role"] == {"enum": ["system", "developer", "user", "assistant", "tool"]}
    assert "include_usage" in body_of("/v1/chat/completions")["properties"]["stream_options"]["properties"]


def test_required_fields():
    """Those without which the parser refuses a body."""
    assert body_of("/v1/completions")["required"] == ["prompt"]
    assert body_of("/v1/chat/completions")["required"] == ["messages"]


def test_a_parser_of_ones_own():
    """Another route's parser is described the same way, whatever it reads."""

    def parse(data, model):
        fields = Fields(data)
        for index, part in enumerate(fields.array("parts", max_items=3) or []):
            inner = Fields(part, f"parts[{index}]")
            if inner.integer("size", None, 1, 9) is None:
                raise bad_field(f"parts[{index}].size", "is required")
            inner.finish({})
        fields.finish({"later": (1,), "never": ()}, {"user": bool})

    size = {"type": "integer", "minimum": 1, "maximum": 9}
    part = {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "properties": {"size": size},
        "required": ["size"],
    }
    assert body_schema(parse, [{"parts": [{"size": 1}]}], MODEL) == {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "properties": {
            "parts": {"type": ["array", "null"], "maxItems": 3, "items": part},
            "later": {"enum": [1, None]},
            "user": {},
        },
    }


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_nobody_listens_while_requests_are_served(parse):
    """Describing leaves nothing behind, also when an example is refused."""
    with pytest.raises(Exception, match="is required"):
        body_schema(parse, [{}], MODEL)

    assert LISTENER.get() is None


async def test_page_and_description(serve, http):
    """The page is open and needs nothing from elsewhere; the description needs a key where there are keys."""
    served = await serve(api_key=("first-key",))

    async with http.get(served.url + "/docs") as response:
        page = await response.text()
        assert response.status == 200
        assert response.headers["Content-Security-Policy"].startswith("default-src 'none'; connect-src 'self'")
    assert re.findall(r"https?://|src=|href=|@import|\burl\(", page) == []
    async with http.get(served.url + "/openapi.json") as response:
        assert response.status == 401
    async with http.get(served.url + "/openapi.json", headers={"Authorization": "Bearer first-key"}) as response:
        assert (await response.json())["paths"] == DOCUMENT["paths"]
