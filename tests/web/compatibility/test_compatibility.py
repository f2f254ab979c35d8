"""The tables of fields in the documentation say what the code does."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable

import pytest

from pagebus.web.adapters.response_input import SAME, read_response
from pagebus.web.app import ROUTES
from pagebus.web.http.errors import ApiError
from pagebus.web.requests.openai import parse_chat, parse_completion
from tests.vllm_names import stored
from tests.web.compatibility.fields import HOW, HOW_AT
from tests.web.compatibility.routes import ANY, BODIES, QUERIES, RESPONSE, served_query
from tests.web.compatibility.tables import body_table, known_here, pages, queries_table, routes_table, table
from tests.web.compatibility.words import ABSENT, DIFFERENT, WHY


def test_the_table_is_up_to_date():
    """``python -m tests.web.compatibility.tables`` makes it so."""
    assert {path.name: path.read_text() for path in pages()} == {path.name: text for path, text in pages().items()}


def rows() -> list[list[str]]:
    """The cells of chats and completions: field, origin, word of chats, of completions, text."""
    return [[cell.strip() for cell in line.split("|")][1:-1] for line in table().splitlines()[2:]]


def refusal(parse: Callable[[], object]) -> tuple[int, str | None, str | None] | None:
    """Status, field and code of what ``parse`` raises, if it does."""
    try:
        parse()
    except ApiError as error:
        return error.status, error.param, error.code
    return None


@pytest.mark.parametrize(
    ("parse", "body", "column"),
    [(parse_chat, {"messages": [{"role": "user", "content": "x"}]}, 2), (parse_completion, {"prompt": "x"}, 3)],
)
def test_what_is_absent_and_what_is_not(parse, body, column):
    """A field that the table calls absent is refused as one that is not supported, but for values that ask for nothing;
    the others are not."""
    words = Counter()
    for name, word in ((row[0].strip("`"), row[column]) for row in rows() if row[column]):
        words[word] += 1
        refused = refusal(lambda name=name: parse({**body, name: "something"}, ANY))
        is_absent = refused in [(400, name, code) for code in ("unsupported_parameter", "unknown_parameter")]
        assert is_absent is (word == "absent"), (name, refused)
    assert set(words) == {"same", "different", "absent", "ours"}


def test_every_field_of_the_parsers_is_in_the_table():
    """And has a word about it."""
    for column, schemas in zip((2, 3), known_here(), strict=True):
        assert set(schemas) <= {row[0].strip("`") for row in rows() if row[column]}


by_path = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.path)


def said(body) -> dict[str, tuple[str, str]]:
    """The word and the text that the table of a route has, by field."""
    cells = [[cell.strip() for cell in line.split("|")] for line in body_table(body).splitlines()[4:]]
    return {row[1].strip("`"): (row[3], row[4]) for row in cells}


@by_path
def test_what_other_routes_serve(body):
    """There is a body with each field that is served, and it is taken as a whole."""
    for sample in body.samples:
        body.parse(dict(sample), ANY)
    served = {name for name, (word, _) in said(body).items() if word != "absent"}
    assert served
    assert served <= {name for sample in body.samples for name in sample}


@by_path
def test_what_other_routes_refuse(body):
    """The rest is a 400 that names the field, unless it is given one of the values that ask for nothing; so is a field
    that nobody knows, but for a server that was told to ignore those."""
    sample = dict(body.samples[-1])
    limited = {name for name, (word, _) in said(body).items() if word == "absent"} | {"no_such_field"}
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
        chat = read_response(dict(sample)).chat
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


def told_of(route: str) -> dict[str, tuple[str, str]]:
    """The word and the text of each field of a route of ours."""
    path = ALIKE.get(route, route)
    if path in ("POST /v1/chat/completions", "POST /v1/completions"):
        column = 2 if "chat" in path else 3
        return {row[0].strip("`"): (row[column], row[4]) for row in rows()}
    bodies = [body for body in BODIES if path in (f"POST {each}" for each in (body.path, *body.also))]
    if bodies:
        return said(bodies[0])
    cells = [[cell.strip() for cell in line.split("|")][1:-1] for line in queries_table().splitlines()[2:]]
    return {row[1].strip("`"): (row[2], row[3]) for row in cells if row[0] == f"`{route}`"}


@pytest.mark.parametrize("route", NAMES["routes"])
def test_every_field_of_vllm_is_listed(route):
    """Of each route that is here, as the same, as different and how, or as absent and why; of the others, the table of
    routes says that they are absent."""
    if route not in {f"{each.method} {each.path}" for each in ROUTES}:
        assert f"| `{route}` | absent |" in PAGES["routes.md"]
        return
    told = told_of(route)
    for name in NAMES["routes"][route]:
        word, text = told[name]
        assert word in ("same", "different", "absent"), name
        assert text or word == "same", name


def test_no_text_is_about_nothing():
    """Each reason and each difference is of a field that some table lists, with that word."""
    pages = table() + "".join(map(body_table, BODIES)) + queries_table()
    for name, text in [*WHY.items(), *HOW.items(), *((name, text) for (_, name), text in HOW_AT.items() if text)]:
        assert re.search(rf"^\|.*`{name}` \|.*{re.escape(text)}", pages, re.M), name
