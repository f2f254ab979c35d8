"""Results in the order of their lines, and bad lines by their numbers."""

from __future__ import annotations

import random
from pathlib import Path

import orjson
import pytest

from pagebus.actors.commands.jobs.ordering import bad_lines, put_in_order
from pagebus.actors.commands.jobs.run_batch import SHOWN_BAD_LINES, tell_bad_lines


def result(entry: str, custom_id: str | None = "x", **more: object) -> dict[str, object]:
    return {"id": f"batch_req_{entry}", "custom_id": custom_id, "response": None, "error": None, **more}


def write(path: Path, results: list[dict[str, object]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in results))
    return path


def test_results_are_put_in_order(tmp_path: Path) -> None:
    """By both parts of the entries' ids, as numbers; what a model has said does not matter."""
    entries = [f"{first}-{second}" for first in (9, 10, 1790000000000) for second in (0, 2, 10)]
    lines = [result(entry, entry, response={"body": 'x "id":"batch_req_1-1" y'}) for entry in entries]
    shuffled = lines.copy()
    random.Random(3).shuffle(shuffled)
    file = write(tmp_path / "out.jsonl", shuffled)
    put_in_order(file)
    assert [orjson.loads(line)["custom_id"] for line in file.read_bytes().splitlines()] == entries
    put_in_order(file)
    assert [each.name for each in tmp_path.iterdir()] == ["out.jsonl"]
    put_in_order(write(file, []))
    assert file.read_bytes() == b""


def test_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that are blank, or have a byte order mark alone, have numbers, but no results. What was refused or failed
    is as bad as what is no request."""
    requests = tmp_path / "in.jsonl"
    requests.write_text("\ufeff\ngood\nno json\nrefused\ngood\n")
    refused = {"status_code": 400, "body": {"error": {"message": "temperature: too hot"}}}
    results = write(
        tmp_path / "out.jsonl",
        [
            result("1-1", response={"status_code": 200, "body": {}}),
            result("1-2", None, error={"code": "invalid_request", "message": "no JSON"}),
            result("1-3", "c", response=refused),
            result("1-4", response={"status_code": 200, "body": {}}),
        ],
    )
    assert list(bad_lines(requests, results)) == [(3, "no JSON"), (4, "temperature: too hot (custom_id 'c')")]
    assert tell_bad_lines(requests, results) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"pagebus: {requests}:3: no JSON", f"pagebus: {requests}:4: temperature: too hot (custom_id 'c')"
    ]  # fmt: skip


def test_many_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first are told, the rest is counted; without any the command has done its work."""
    requests = tmp_path / "in.jsonl"
    requests.write_text("x\n" * 30)
    bad = [result(f"1-{i}", error={"message": "no"}) for i in range(30)]
    assert tell_bad_lines(requests, write(tmp_path / "out.jsonl", bad)) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(told) == SHOWN_BAD_LINES + 1
    assert "30 lines were not computed" in told[-1]
    good = [result(f"1-{i}", response={"status_code": 200}) for i in range(30)]
    assert tell_bad_lines(requests, write(tmp_path / "out.jsonl", good)) == 0
