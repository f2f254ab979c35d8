"""The tables of fields in the documentation say what the code does."""

from __future__ import annotations

import dataclasses
import re

import pytest
from compatibility_routes import ANY, BODIES, QUERIES, RESPONSE, served_query
from fake_backend import MODEL

from tests.web.compatibility import PAGE, body_table, known_here, table, with_table
from web.app import ROUTES
from web.errors import ApiError
from web.schemas import parse_chat, parse_completion
from web.shapes.response_input import SAME, chat_body, read_response


def test_the_table_is_up_to_date():
    """``python -m tests.web.compatibility`` makes it so."""
    page = PAGE.read_text()

    assert with_table(page) == page


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


def test_routes_that_are_not_here():
    """No route has come meanwhile that the page says is missing."""
    listed = PAGE.read_text().split("<!-- routes that are not here -->")[1].split("<!--")[0]
    first_cells = " ".join(row.split("|")[1] for row in listed.splitlines() if row)
    missing = set(re.findall(r"`(/[^`]+)`", first_cells))
    assert len(missing) > 20
    assert missing.isdisjoint(route.path for route in ROUTES)
