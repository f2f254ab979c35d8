"""The tables of fields in the documentation say what the code does."""

from __future__ import annotations

import dataclasses
import re

import pytest
from compatibility_routes import ANY, BODIES, QUERIES, RESPONSE, served_query
from compatibility_words import ABSENT, DIFFERENT
from fake_backend import MODEL

from tests.vllm_names import stored
from tests.web.compatibility import body_table, known_here, pages, routes_table, table
from web.app import ROUTES
from web.errors import ApiError
from web.schemas import parse_chat, parse_completion
from web.shapes.response_input import SAME, chat_body, read_response


def test_the_table_is_up_to_date():
    """``python -m tests.web.compatibility`` makes it so."""
    assert {path.name: path.read_text() for path in pages()} == {path.name: text for path, text in pages().items()}


def rows(column: int, what: str) -> list[str]:
    """Names of the fields of which the table says so."""
    cells = [[cell.strip() for cell in line.split("|")] for line in table().splitlines()[2:]]
    return [row[1].strip("`") for row in cells if row[column] == what]


@pytest.mark.parametrize(("parse", "column"), [(parse_chat, 3), (parse_completion, 4)])
def test_what_is_refused_is_named(parse, column):
    """A field with a 400 in the table gets one, whatever its value."""
    body = {"messages": [{"role": "user", "content": "x"}]} if column == 3 else {"prompt": "x"}
    refused = rows(column, "400")
    assert refused
    for name in refused:
        with pytest.raises(ApiError) as caught:
            parse({**body, name: "something"}, MODEL)
        assert (caught.value.status, caught.value.param) == (400, name)


def test_every_field_of_the_parsers_is_in_the_table():
    """And has a word about it."""
    for column, schemas in zip((3, 4), known_here(), strict=True):
        assert set(schemas) <= {line.split("`")[1] for line in table().splitlines()[2:]} - set(rows(column, ""))


by_path = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.path)


def said(body) -> dict[str, str]:
    """What the table of a route says, by field."""
    cells = [[cell.strip() for cell in line.split("|")] for line in body_table(body).splitlines()[4:]]
    return {row[1].strip("`"): row[3] for row in cells}


@by_path
def test_what_other_routes_serve(body):
    """There is a body with each field that is served, and it is taken as a whole."""
    for sample in body.samples:
        body.parse(dict(sample), ANY)
    served = {name for name, what in said(body).items() if what.startswith("served")}
    assert served
    assert served <= {name for sample in body.samples for name in sample}


@by_path
def test_what_other_routes_refuse(body):
    """The rest is a 400 that names the field, unless it is given one of the values that ask for nothing; so is a field
    that nobody knows, but for a server that was told to ignore those."""
    sample = dict(body.samples[-1])
    limited = {name for name, what in said(body).items() if "400" in what} | {"no_such_field"}
    for name in limited:
        with pytest.raises(ApiError) as caught:
            body.parse({**sample, name: "something"}, ANY)
        assert (caught.value.status, caught.value.param) == (400, name)
    known = body.known()
    for name in limited & set(known):
        for value in known[name].get("enum", ()):
            body.read({**sample, name: value}, ANY)
    lax = dataclasses.replace(ANY, allow_unknown_fields=True)
    body.read({**sample, "no_such_field": 1}, lax)


def test_fields_of_a_response_that_mean_the_same_in_a_chat():
    """They reach it as they are."""
    for sample in RESPONSE.samples:
        chat = chat_body(read_response(dict(sample)).kept([]))
        assert {name: chat[name] for name in SAME if name in sample} == {
            name: sample[name] for name in SAME if name in sample
        }


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.path)
async def test_what_is_refused_in_a_query(serve, http, tmp_path, query):
    """By its name, before anything is looked up."""
    served = await serve(files_dir=str(tmp_path))
    refused = query.api - served_query(query)
    assert served_query(query) <= query.api
    for name in refused:
        path = query.path.format(response_id="resp_1")
        async with http.get(served.url + path, params={name: "something"}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, name)


NAMES = stored()
PAGES = {path.name: path.read_text() for path in pages()}
ALIKE = {
    "POST /v1/chat/completions/render": "POST /v1/chat/completions",
    "POST /v1/completions/render": "POST /v1/completions",
    "POST /v1/messages/render": "POST /v1/messages",
    "POST /v1/responses/render": "POST /v1/responses",
    "POST /inference/v1/abort_requests": "POST /abort_requests",
}
"""Routes whose bodies are those of others."""


def test_every_flag_of_vllm_is_listed():
    """On the page of flags; its short forms too."""
    assert len(NAMES["flags"]) > 300
    assert [flag for flag in NAMES["flags"] if f"`{flag}`" not in PAGES["flags.md"]] == []


def test_every_route_of_vllm_is_listed():
    """On the page of routes: as the same, as different and how, or as absent and why. What is called absent is so."""
    rows = [[cell.strip() for cell in line.split("|")] for line in routes_table().splitlines()[2:]]
    said = {row[1].strip("`"): (row[2], row[3]) for row in rows}
    assert said.keys() == NAMES["routes"].keys()
    assert all(how == "same" or text for how, text in said.values())
    ours = {f"{route.method} {route.path}" for route in ROUTES}
    assert {name for name, (how, _) in said.items() if how != "absent"} == NAMES["routes"].keys() & ours
    assert ABSENT.keys().isdisjoint(ours)
    assert DIFFERENT.keys() <= ours


@pytest.mark.parametrize("route", NAMES["routes"])
def test_every_field_of_vllm_is_listed(route):
    """Of each route that is here, in that route's table, or in the schema of its query; with a word about it."""
    here = {f"{each.method} {each.path}": each for each in ROUTES}.get(route)
    if here is None or not NAMES["routes"][route]:
        return
    route = ALIKE.get(route, route)
    if route in ("POST /v1/chat/completions", "POST /v1/completions"):
        listed = set(re.findall(r"^\| `(\w+)`", table(), re.M))
    elif here.about.query:
        listed = set(here.about.query)
    else:
        (body,) = [body for body in BODIES if f"POST {body.path}" == route]
        listed = set(said(body))
    assert set(NAMES["routes"][route]) - listed == set()


def test_what_is_not_served_says_why():
    """Every field with a 400 has a reason (``WHY`` in compatibility_words.py)."""
    told = table() + "".join(map(body_table, BODIES))
    cells = [[cell.strip() for cell in line.split("|")] for line in told.splitlines() if line.startswith("| `")]
    refused = {row[1].strip("`"): row[-2] for row in cells if any(re.search(r"(^|else )400$", cell) for cell in row)}
    assert [name for name, text in refused.items() if not text] == []
    assert len(refused) > 30
