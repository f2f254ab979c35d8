"""``pagebus simulate`` on the command line: tables, files, pictures, and errors."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from pagebus.actors.commands.cli import main
from pagebus.actors.simulator.recording.recorded import read_rows, read_run
from pagebus.actors.simulator.recording.trace import read_trace
from pagebus.actors.simulator.workloads import make_workload
from pagebus.bus import connect
from pagebus.bus.streams import Names

SMALL = ["simulate", "--workload", "chat", "--requests", "20"]


def test_simulate_prints_and_stores_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table goes to standard output, speed to standard error, and --json stores the same for programs."""
    path = tmp_path / "report.json"
    assert main([*SMALL, "--executors", "2", "--json", str(path), "--slo-ttft-ms", "50"]) == 0
    printed = capsys.readouterr()
    assert "time to first token" in printed.out
    assert "us a step" in printed.err
    report = json.loads(path.read_text())
    assert report["requests"] == {"sent": 20, "done": 20, "failed": 0, "unserved": 0}
    assert len(report["executors"]) == 2


def test_simulate_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--plot makes pictures that are valid XML; a block map only of a small cache."""
    assert main([*SMALL, "--num-gpu-blocks-override", "64", "--plot", str(tmp_path / "a")]) == 0
    assert main([*SMALL, "--plot", str(tmp_path / "b")]) == 0
    pictures = {path.name: ElementTree.parse(path).getroot() for path in (tmp_path / "a").glob("*.svg")}
    assert set(pictures) == {"batch.svg", "latency.svg", "blocks.svg", "sequences.svg", "block-map.svg"}
    assert all(root.tag.endswith("svg") and len(root) > 10 for root in pictures.values())
    assert not (tmp_path / "b" / "block-map.svg").exists()


def test_a_simulated_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--record writes what 'pagebus record' would: the same requests to be simulated again, and all steps with their
    changes of the block tables, so that the page can replay them. Watching changes nothing."""
    small = [
        "simulate",
        "--workload",
        "chat",
        "--requests",
        "12",
        "--executors",
        "2",
        "--num-gpu-blocks-override",
        "600",
    ]
    path, plain, watched = tmp_path / "run.jsonl.gz", tmp_path / "a.json", tmp_path / "b.json"
    assert main([*small, "--json", str(plain)]) == 0
    plot = ["--plot", str(tmp_path / "plots")]
    assert main([*small, "--json", str(watched), "--record", str(path), *plot]) == 0
    report = json.loads(watched.read_text())
    assert report == json.loads(plain.read_text())

    rows = list(read_rows(path))
    assert (rows[0]["block_size"], rows[0]["num_blocks"]) == (16, 600)
    steps = [row for row in rows if "step" in row]
    for executor in report["executors"]:
        mine = [row for row in steps if row["replica"] == executor["name"]]
        assert [row["step"] for row in mine] == list(range(1, executor["steps"] + 1))
        run, tables = read_run(path, executor["name"])
        assert sum(row["decodes"] + row["prefill_tokens"] for row in mine) == sum(map(sum, run.steps))
        assert tables.entered > 0
        assert max(run.held) <= 600
    lengths = [np.sort(trace.prompt_tokens + 1j * trace.output_tokens) for trace in (
        read_trace(path), make_workload("chat", requests=12))]  # fmt: skip
    assert np.array_equal(*lengths)
    assert main(["simulate", "--trace", str(path)]) == 0


def test_a_trace_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests of a file; those that nobody serves make the command fail."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 20, "output_tokens": 500}\n')
    assert main(["simulate", "--trace", str(path)]) == 0
    assert main(["simulate", "--trace", str(path), "--faults", "kill executor-0 at 0.1"]) == 1
    assert "1 unserved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--workload", "nonsense"], "no 'nonsense'; there are mixed256"),
        (["--trace", "/nowhere"], "--trace"),
        (["--workload", "chat", "--profile", "x"], "no profile 'x'"),
        (["--workload", "chat", "--faults", "boom"], "'boom': write"),
        (["--workload", "chat", "--seed", "-1"], "--seed -1: must be at least 0"),
        (["--workload", "chat", "--requests", "0"], "--requests 0 is too small"),
        (["--workload", "chat", "--executors", "0"], "--executors"),
        (["--workload", "chat", "--pipeline-depth", "99"], "--pipeline-depth"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is said, and the exit code is 2."""
    assert main(["simulate", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_workloads_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """--workload list shows what there is."""
    assert main(["simulate", "--workload", "list"]) == 0
    assert "mixed256" in capsys.readouterr().out


def test_record_needs_a_bus(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --bus there is nothing to record."""
    assert main(["record", "--out", "/dev/null"]) == 2
    assert "--bus is needed" in capsys.readouterr().err


def test_a_recording_of_a_deployment(
    tmp_path: Path,
    redis_url: str,
    redis_names: Names,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compressed if its name says so, as all that read it expect; what is in the way is said in one line."""
    record = ["record", "--name", redis_names.deployment, "--seconds", "0"]
    assert main([*record, "--bus", redis_url, "--out", str(tmp_path / "run.jsonl.gz")]) == 0
    with gzip.open(tmp_path / "run.jsonl.gz", "rt") as file:
        assert "pagebus_trace" in json.loads(file.readline())
    capsys.readouterr()
    assert main([*record, "--bus", redis_url, "--out", "/nowhere/x"]) == 2
    assert capsys.readouterr().err == "pagebus: --out: [Errno 2] No such file or directory: '/nowhere/x'\n"
    monkeypatch.setattr(connect, "open_bus", partial(connect.open_bus, connect_timeout_s=0.0))  # tried once
    assert main([*record, "--bus", "redis://127.0.0.1:1", "--out", str(tmp_path / "run.jsonl.gz")]) == 1
    assert capsys.readouterr().err.startswith("pagebus: no connection to Redis at redis://127.0.0.1:1")
    assert (tmp_path / "run.jsonl.gz").stat().st_size > 0
