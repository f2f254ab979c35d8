"""What `make quick` chooses to run, and the configurations of editors and hooks beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.quick import ALWAYS, ROOT, Deadline, files_to_run


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ("bus/codec.py", "tests/bus/test_codec.py"),
        ("actors/scheduler/kv/block_pool.py", "tests/actors/scheduler/kv/test_block_pool.py"),
        ("tests/web/jobs/test_window.py", "tests/web/jobs/test_window.py"),
        ("docs/start.md", "tests/test_docs.py"),
        ("web/static/js/chat/models.js", "tests/browser/playground/test_adapters.py"),
        ("web/static/js/views/chat.js", "tests/browser/playground/test_adapters.py"),
        ("web/static/js/api.js", None),
    ],
)
def test_the_nearest_test_comes_first(changed: str, first: str | None) -> None:
    """After those that always run: the file's own test, then the others of its room."""
    chosen = files_to_run([changed])
    assert chosen[: len(ALWAYS)] == list(ALWAYS)
    room = chosen[len(ALWAYS) :]
    assert room[0] == first if first else {Path(each).parent for each in room} == {Path("tests/browser")}


def test_a_room_without_tests_takes_those_above() -> None:
    """And rooms beside or below it are left alone."""
    chosen = files_to_run(["bus/messages/sampling.py", "bus/nothing.py"])
    assert {Path(each).parent for each in chosen[len(ALWAYS) :]} == {Path("tests/bus")}


def test_what_always_runs_exists() -> None:
    """So does every file that is chosen."""
    assert [each for each in files_to_run(["web/app.py", "LICENSE"]) if not (ROOT / each).exists()] == []


def test_no_test_begins_after_the_deadline() -> None:
    """Those that are left out are counted."""
    now_s = iter([0.0, 1.0, 2.9, 3.0, 9.0])
    deadline = Deadline(3.0, clock=lambda: next(now_s))
    item = pytest.Item.__new__(pytest.Function)
    assert [deadline.pytest_runtest_protocol(item) for _ in range(4)] == [None, None, True, True]
    assert deadline.num_left_out == 2


def test_hooks_are_targets_of_make() -> None:
    """Hooks use the tools that constraints.txt pins, from .venv: none is fetched, and no version stands twice."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    targets = [re.fullmatch(r"make ([a-z-]+)", hook["entry"]) for hook in hooks]
    makefile = (ROOT / "Makefile").read_text()

    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    assert {hook["language"] for hook in hooks} == {"system"}
    assert [match.group(1) for match in targets if match] == ["lint", "types"]
    assert all(match and re.search(rf"^{match.group(1)}:.* ## \w", makefile, re.M) for match in targets)


def test_editors_know_the_width_of_a_line() -> None:
    """It is the one that ruff keeps."""
    assert "max_line_length = 120" in (ROOT / ".editorconfig").read_text()
    assert "line-length = 120" in (ROOT / "pyproject.toml").read_text()
