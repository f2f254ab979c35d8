"""`pagebus job`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagebus.actors.commands.cli import main
from pagebus.bus.streams import Names


def test_a_file_from_submission_to_results(
    tmp_path: Path, redis_url: str, redis_names: Names, capsys: pytest.CaptureFixture[str]
) -> None:
    """Submitted, looked at, cancelled; results that are there are written, without waiting for the others."""
    file = tmp_path / "in.jsonl"
    file.write_text('{"custom_id": "a"}\n{"custom_id": "b"}\n')

    place = ["--bus", redis_url, "--name", redis_names.deployment]

    def job(action: str, *options: str) -> tuple[int, dict[str, object]]:
        code = main(["job", action, str(file), *options, *place])
        return code, json.loads(capsys.readouterr().out)

    for action in ("cancel", "results"):  # a cancellation would end what is submitted later, results never come
        assert main(["job", action, str(file), *place]) == 1
    assert "nothing of" in capsys.readouterr().err
    code, told = job("submit")
    assert (code, told["submitted"]) == (0, 2)
    batch = told["batch"]
    rest = {"completed": 0, "failed": 0, "cancelled": 0, "waiting": 2}
    assert job("status") == (0, {"batch": batch, "submitted": 2, **rest})
    assert job("status", "--batch", "unknown")[0] == 1
    assert job("cancel")[0] == 0
    code, told = job("results", "--no-wait")
    assert (code, told["results"]) == (0, str(tmp_path / "in.results.jsonl"))
    assert (tmp_path / "in.results.jsonl").read_text() == ""


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no file, and a bus that was not given, are said at once."""
    assert main(["job", "status", "/nowhere", "--bus", "redis://h"]) == 2
    assert main(["run-batch", "-i", "/nowhere", "-o", "x"]) == 2
    assert main(["job", "status", __file__]) == 2
    assert "--bus is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--batch", "two words"), ("--batch", ""), ("--priority", "-1000000000")]
)
def test_what_no_job_can_have(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Is refused before every line is answered with an error."""
    assert main(["job", "submit", __file__, f"{option}={value}", "--bus", "redis://h"]) == 2
    assert capsys.readouterr().err.startswith(f"pagebus: {option} ")


@pytest.mark.parametrize(
    "words", [("job", "results", __file__, "--bus", "redis://h", "-o"), ("run-batch", "-i", __file__, "-o")]
)
def test_results_that_cannot_be_written(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Are refused before anything is computed."""
    assert main([*words, "/nowhere/out.jsonl"]) == 2
    assert capsys.readouterr().err == "pagebus: /nowhere/out.jsonl: No such file or directory\n"


def test_results_do_not_replace_the_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("{}")
    assert main(["run-batch", "-i", str(file), "-o", str(tmp_path / "." / "in.jsonl")]) == 2
    assert "results would replace the requests" in capsys.readouterr().err
    assert file.read_text() == "{}"
