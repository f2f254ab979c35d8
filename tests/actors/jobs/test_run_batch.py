"""The commands against a real deployment, as a user gives them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.oracle import make_oracle

ROOT = Path(__file__).parents[3]


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


def test_run_batch(tmp_path: Path) -> None:
    """A file is answered by a deployment of its own, which ends with it."""
    model = make_oracle(tmp_path / "model")
    out = tmp_path / "out.jsonl"
    command = [
        *(sys.executable, "-m", "actors.cli", "run-batch", "-i", str(write_requests(tmp_path / "in.jsonl", 20))),
        *("-o", str(out), "--model", str(model), "--load-format", "dummy", "--device", "cpu", "--threads", "1"),
        *("--cpu-kv-cache-gib", "0.002", "--swap-space", "0"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results = {line["custom_id"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert results.keys() == {*map(str, range(20)), "bad"}
    assert results.pop("bad")["error"]["code"] == "invalid_request"
    assert {line["response"]["body"]["usage"]["completion_tokens"] for line in results.values()} <= {1, 2, 3, 4}
