"""The table of fields in the documentation says what the code does."""

from __future__ import annotations

import pytest
from fake_backend import MODEL

from tests.web.compatibility import PAGE, known_here, table, with_table
from web.errors import ApiError
from web.schemas import parse_chat, parse_completion


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
    assert len(refused) >= 5
    for name in refused:
        with pytest.raises(ApiError) as caught:
            parse({**body, name: "something"}, MODEL)
        assert (caught.value.status, caught.value.param) == (400, name)


def test_every_field_of_the_parsers_is_in_the_table():
    """And has a word about it."""
    for column, schemas in zip((3, 4), known_here(), strict=True):
        assert set(schemas) <= {line.split("`")[1] for line in table().splitlines()[2:]} - set(rows(column, ""))
