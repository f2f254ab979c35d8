"""No test says how fast a machine has to be: what is waited for is waited for as long as all else."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.patience import MOST_S, PatientClock
from tests.helpers.waiting import LIMIT_S, TEST_LIMIT_S

ROOT = Path(__file__).parents[1]
WAITERS = {"asyncio.timeout", "asyncio.wait_for", "asyncio.wait", "subprocess.run", "urllib.request.urlopen",
           "pytest.mark.timeout", "httpx.get", "httpx.post", "httpx.Client", "httpx.AsyncClient", "openai.OpenAI",
           "openai.AsyncOpenAI"}  # fmt: skip
METHODS = {"communicate", "wait", "result"}
"""Of processes, events and futures."""
OTHERS = ("chaos", "compatibility", "containers", "dst", "gpu")
"""Not of `make test`: they have machines of their own, or virtual time."""


def limits(source: str) -> Iterator[int]:
    """The lines with a call that waits for a number of seconds, one or more, that stands there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            told = [*node.args[:2], *(each.value for each in node.keywords if each.arg == "timeout")]
            numbers = [each.value for each in told if isinstance(each, ast.Constant)]
            if not any(isinstance(each, int | float) and each >= 1 for each in numbers):
                continue
            name = ast.unparse(node.func)
            if name in WAITERS or name.rpartition(".")[2] in METHODS:
                yield node.lineno


def test_limits_are_found() -> None:
    """Those of a test that says how fast a machine has to be, and no others."""
    bad = "asyncio.timeout(20)", "process.communicate(timeout=5)", "subprocess.run(x, timeout=60)", "done.wait(1.0)"
    good = "asyncio.timeout(LIMIT_S)", "asyncio.wait(tasks, timeout=0.1)", "work()", "asked(timeout=2.5)"
    assert [list(limits(text)) for text in bad] == [[1]] * len(bad)
    assert [list(limits(text)) for text in good] == [[]] * len(good)


def test_no_test_has_a_limit_of_its_own() -> None:
    """There is one, which only ends what hangs: ``LIMIT_S``."""
    files = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("*.py")]
    tests = [path for path in files if path.parts[0] not in OTHERS and not path.name.startswith("bench_")]
    found = {str(path): list(limits((ROOT / "tests" / path).read_text())) for path in tests}
    assert len(found) > 200
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_test_may_last_longer_than_what_it_waits_for() -> None:
    """Else pytest would end it before it could say what has not come."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["timeout"] == TEST_LIMIT_S > LIMIT_S


def test_a_process_that_stands_still_does_not_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it does; otherwise its clock goes as others do."""
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    clock = PatientClock()
    began_s = clock()
    for _ in range(8):
        now_s += MOST_S / 2
        assert clock() > began_s
    assert clock() - began_s == 4 * MOST_S
    now_s += 3600.0
    assert clock() - began_s == 5 * MOST_S
