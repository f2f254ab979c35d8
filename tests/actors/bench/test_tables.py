"""Markdown beside published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagebus.actors.bench.driver.points import make_workloads
from pagebus.actors.bench.tables import BEGIN, END, GOALS, bench_tables
from pagebus.actors.settings import SettingsError
from pagebus.actors.simulator.workloads import WORKLOADS


def results(tmp_path: Path, name: str, point: str, figures: dict[str, tuple[float, ...]], **fields: Any) -> str:
    """A file as a benchmark writes it; figures are (median, low, high)."""
    table = {key: dict(zip(("median", "low", "high"), value, strict=True)) for key, value in figures.items()}
    told = {"benchmark": "engine", "model": "llama8b", "settings": [], "scale": 1.0, **fields}
    path = tmp_path / name
    path.write_text(json.dumps({**told, "points": [{"name": point, "figures": table}]}))
    return str(path)


def test_cells_hold_vllm_the_goal_and_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A goal that is reached is bold; tables without any figure are not printed."""
    slow = results(tmp_path, "a", "decode/1", {"step_ms_mean": (4.5, 4.4, 4.61)})
    fast = results(tmp_path, "b", "mixed256", {"output_tokens_per_s": (12345.6, 12000, 12400)})
    bench_tables([slow, fast])
    lines = capsys.readouterr().out.splitlines()
    assert "| 1 | 4.74 | 4.00 | 4.50 (4.40 to 4.61) | 1.49 | 0.65 | - |" in lines
    assert "| `mixed256`, output | 10 311 | 12 000 | **12 346 (12 000 to 12 400)** | 25 176 | 33 000 | - |" in lines
    assert [line for line in lines if line.startswith("**") and "HTTP" in line] == []


def test_another_cache_format_is_another_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures with an FP8 cache do not stand in the row without."""
    file = results(
        tmp_path, "a", "mixed256", {"output_tokens_per_s": (5.0, 4.0, 6.0)}, settings=["--kv-cache-dtype=fp8"]
    )
    bench_tables([file])
    rows = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "|" in line}
    assert "5 (4 to 6)" in rows["`mixed256`, FP8 cache, output"]
    assert "5 (4 to 6)" not in rows["`mixed256`, output"]


def test_tables_go_between_the_marks_of_a_document(tmp_path: Path) -> None:
    """What stood there is replaced; a document without marks is refused and stays."""
    document = tmp_path / "performance.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for median in (4.5, 3.9):
        bench_tables([results(tmp_path, "a", "decode/1", {"step_ms_mean": (median, 3.8, 4.6)})], str(document))
    text = document.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n**One decode step, ms**\n")
    assert text.endswith(f"|\n\n{END}\nafter\n")
    assert (text.count("**3.90 (3.80 to 4.60)**"), text.count("4.50"), text.count("old")) == (1, 0, 0)
    (tmp_path / "other.md").write_text("nothing")
    with pytest.raises(SettingsError, match="no place for tables"):
        bench_tables([results(tmp_path, "a", "decode/1", {"step_ms_mean": (1, 1, 1)})], str(tmp_path / "other.md"))


def test_the_last_file_wins_and_seconds_are_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A point that was measured again is shown anew; units are the row's."""
    old = results(tmp_path, "a", "longctx/8k", {"ttft_ms_p50": (500.0, 500.0, 500.0)})
    new = results(tmp_path, "b", "longctx/8k", {"ttft_ms_p50": (190.0, 180.0, 201.0)})
    bench_tables([old, new])
    assert "| 0.202 | 0.195 | **0.190 (0.180 to 0.201)** |" in capsys.readouterr().out


def test_servers_are_known_by_their_models_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A benchmark over HTTP names the model as the server does."""
    spec = {"model": "/tmp/llama8b", "scale": 1.0, "requests": None}
    path = results(tmp_path, "a", "serve/chat256", {"itl_ms_p99": (39.0, 38.0, 41.0)}, benchmark="serve", spec=spec)
    content = json.loads(Path(path).read_text())
    del content["model"]
    Path(path).write_text(json.dumps(content))
    bench_tables([path])
    assert "| 57.0 | 40.0 | **39.0 (38.0 to 41.0)** |" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{"scale": 0.5}, {"requests": 3}], ids=str)
def test_smaller_workloads_are_refused(tmp_path: Path, changed: dict[str, float]) -> None:
    """What was not measured as published does not stand beside published figures."""
    with pytest.raises(SettingsError, match="sizes were changed"):
        bench_tables([results(tmp_path, "a", "decode/1", {"step_ms_mean": (1.0, 1.0, 1.0)}, **changed)])


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    """Something else, or nothing, is named."""
    (tmp_path / "x").write_text("[]")
    for path in (tmp_path / "x", tmp_path / "missing"):
        with pytest.raises(SettingsError, match="no results"):
            bench_tables([str(path)])


def test_every_row_is_a_point_of_a_workload() -> None:
    """No row waits for a figure that no benchmark makes."""
    workloads = make_workloads(batches=[1, 8, 32, 64, 128, 256])
    points = {point.name for workload in workloads.values() for point in workload.points if point.shown}
    points |= {f"serve/{name}" for name in WORKLOADS} | {"start"}
    rows = [row for table in json.loads(GOALS.read_text())["tables"] for row in table["rows"]]
    assert {row["point"] for row in rows} <= points
    assert {row["better"] for row in rows} == {"less", "more"}
