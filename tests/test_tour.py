"""The tour through the code names what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs/tour.md").read_text()
ROWS = [
    (file, name)
    for file, names in re.findall(r"^\| `([\w/.]+)` \| ([^|]+) \|", TOUR, re.M)
    for name in re.findall(r"`([\w.]+)`", names)
]


def find(file: str, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """The function, or the method of a class: `Class.method`."""
    body = ast.parse((ROOT / file).read_text()).body
    *classes, function = name.split(".")
    for each in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each)
    return next(
        node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    )


def test_the_tour_is_one() -> None:
    """Both ways have rows, in every actor."""
    assert {file.split("/")[1] for file, _ in ROWS if file.startswith("actors/")} == {
        "tokenizer", "scheduler", "executor", "detokenizer",
    }  # fmt: skip
    assert len(ROWS) > 60
    assert TOUR.index("## One request") < TOUR.index("## One step")


@pytest.mark.parametrize(("file", "name"), sorted(set(ROWS)))
def test_every_function_on_the_tour_exists(file: str, name: str) -> None:
    """And has statements of its own."""
    assert find(file, name).body
