"""The commands against a real deployment, as a user gives them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.oracle import make_oracle
from tests.helpers.waiting import LIMIT_S

ROOT = Path(__file__).parents[4]


def write_requests(path: Path, count: int) -> Path:
    lines = [
        {
            "custom_id": f"{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"word {i}", "max_tokens": 4},
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"custom_id": "bad"}\n')
    return path


BUSES = pytest.mark.parametrize("bus", [(), ("--bus", "memory://")], ids=["redis", "memory"])


def command_for(tmp_path: Path, bus: tuple[str, ...]) -> list[str]:
    """Answers 20 requests and a bad line."""
    model, requests = make_oracle(tmp_path / "model"), write_requests(tmp_path / "in.jsonl", 20)
    return [
        *(sys.executable, "-m", "pagebus.actors.commands.cli", "run-batch", "-i", str(requests)),
        *("-o", str(tmp_path / "out.jsonl"), "--model", str(model), "--load-format", "dummy", "--device", "cpu"),
        *("--threads", "1", "--cpu-kv-cache-gib", "0.002", "--swap-space", "0", *bus),
    ]


@BUSES
def test_ctrl_c_is_no_failure(tmp_path: Path, bus: tuple[str, ...]) -> None:
    """A script can tell one that was stopped from one whose lines could not be answered."""
    with subprocess.Popen(command_for(tmp_path, bus), cwd=ROOT, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        running.stderr.readline()  # how far the start is
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 130, told
    assert "Traceback" not in told


@BUSES
def test_run_batch(tmp_path: Path, bus: tuple[str, ...]) -> None:
    """A file is answered by a deployment of its own, which ends with it; results are in the order of the lines, and a
    bad one is named and makes the command fail."""
    out, command = tmp_path / "out.jsonl", command_for(tmp_path, bus)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 1, done.stderr
    assert f"pagebus: {tmp_path / 'in.jsonl'}:21: url: must be a string" in done.stderr
    results = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert list(results) == [*map(str, range(20)), "bad"]
    assert results.pop("bad")["error"]["code"] == "invalid_request"
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in results.values()} <= {1, 2, 3, 4}
