"""What the simulator says of runs that were measured on an H200, and that its profiles were not fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu.bench.bench_workloads import COMPARED, predict_row

MEASURED = Path(__file__).parents[3] / "docs/measurements/h200-workloads.json"
FITTED_SEED = 0


@pytest.mark.parametrize("model", ["llama8b", "qwen06b"])
def test_unseen_workloads_are_predicted_within_a_tenth(model: str) -> None:
    """Throughput and times to the first token."""
    (rows,) = [each["rows"] for each in json.loads(MEASURED.read_text()) if each["model"] == model]
    unseen = [row for row in rows if row["seed"] != FITTED_SEED]
    assert {row["workload"] for row in unseen} >= {"mixed256", "chat1000"}
    for row in unseen:
        assert predict_row(model, row) == pytest.approx({name: row[name] for name in COMPARED}, rel=0.1), row
