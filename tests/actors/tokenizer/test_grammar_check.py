"""Trying grammars: what is served, what is refused and why, and what a hostile one costs the others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import pagebus.actors.shipped_model
from pagebus.actors.settings import Settings
from pagebus.actors.tokenizer.grammar_check import GrammarChecker, Verdict
from pagebus.bus.messages import StructuredOutput

pytestmark = pytest.mark.asyncio(loop_scope="module")
FOLDER = str(Path(pagebus.actors.shipped_model.__file__).parent)
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{length}}}b.*$"} for length in range(20, 60)]})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(Settings(model=FOLDER, structured_output_timeout_s=1.0))
    yield checker
    await checker.close()


def wanted(kind: str, text: str) -> StructuredOutput:
    return StructuredOutput(kind=kind, text=text, field="it")


async def test_a_verdict_is_kept(checker):
    """The second time nothing is tried."""
    schema = wanted("json", '{"type": "object"}')
    assert checker.known(schema) is None

    verdict = await checker.check(schema)

    assert verdict.problem == ""
    assert json.loads(verdict.grammar)["grammars"]
    assert checker.known(schema) is verdict


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json", '{"not": {"type": "null"}}', "not"),
        ("json", '{"type": "strin"}', "strin"),
        ("json", '{"$ref": "https://example.org/schema.json"}', "example.org"),
        ("regex", "(unclosed", "unclosed"),
        ("regex", "(?=ahead)x", "look-ahead"),
        ("grammar", "root ::= missing", "missing"),
        ("choice", json.dumps(["value"] * 5) + " ", ""),
        ("json", ENDLESS, "within 1 s"),
        ("regex", "[ab]{1,3}", ""),
    ],
)
async def test_verdicts(checker, kind, text, problem):
    """What is wrong or unknown is said; one that takes too long is given up, and the next is served again."""
    verdict = await checker.check(wanted(kind, text))

    assert bool(verdict.grammar) is (problem == "")
    assert problem in verdict.problem


async def test_a_model_without_a_tokenizer(tmp_path):
    """Nothing can be followed there, and each request is told so."""
    (tmp_path / "config.json").write_text((Path(FOLDER) / "config.json").read_text())
    checker = GrammarChecker(Settings(model=str(tmp_path)))

    verdict = await checker.check(wanted("regex", "a"))

    await checker.close()
    assert verdict == Verdict(problem="this model has no tokenizer")
