"""Tokens by expert: from the device's counters to metrics."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pagebus.actors.executor.metrics.experts import ExpertMetrics
from pagebus.actors.executor.step.expert_counts import READ_EVERY_S, ExpertCounts
from pagebus.actors.telemetry.metrics import Metrics
from tests.actors.executor.models.test_families import SETTINGS
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden

HIGHEST = 2**31 - 1


def test_counters_are_read_now_and_then() -> None:
    """What they hold at first does not count, a copy is made once a second, and only when the last has been taken."""
    counts = [torch.tensor([5, 0, 1], dtype=torch.int32), torch.tensor([2, 2, 2], dtype=torch.int32)]
    experts = ExpertCounts(counts)
    assert experts.totals().tolist() == [[0, 0, 0], [0, 0, 0]]
    counts[0] += torch.tensor([1, 2, 3], dtype=torch.int32)
    assert experts.totals().sum() == 0
    experts.fetch(100.0)
    counts[0] += 10
    experts.fetch(100.0 + 2 * READ_EVERY_S)  # the last copy has not been taken
    assert experts.totals().tolist() == [[1, 2, 3], [0, 0, 0]]
    experts.fetch(100.0 + READ_EVERY_S / 2)  # too early
    assert experts.totals().tolist() == [[1, 2, 3], [0, 0, 0]]
    experts.fetch(100.0 + READ_EVERY_S)
    assert experts.totals().tolist() == [[11, 12, 13], [0, 0, 0]]


def test_counters_wrap_around() -> None:
    """They have 32 bits, the totals 64."""
    counts = [torch.tensor([HIGHEST - 1], dtype=torch.int32)]
    experts = ExpertCounts(counts)
    for read in range(3):
        counts[0] += HIGHEST
        experts.fetch(1000.0 * read)
        assert experts.totals().tolist() == [[(read + 1) * HIGHEST]]


def test_metrics_sum_up_each_layer() -> None:
    """Three series for each layer, of what came since the last reading; without new tokens they stay."""
    metrics = Metrics()
    experts = ExpertMetrics(metrics, "a", (1, 3))
    experts.update(np.array([[4, 0, 0, 4], [1, 1, 1, 1]]))
    experts.update(np.array([[5, 1, 1, 5], [1, 1, 1, 1]]))
    found = {(name, labels["layer"]): data["value"] for name, labels, data in metrics.snapshot()["series"]}
    assert found == {
        ("pagebus:expert_tokens_total", "1"): 12, ("pagebus:expert_tokens_total", "3"): 4,
        ("pagebus:expert_load_ratio", "1"): 1.0, ("pagebus:expert_load_ratio", "3"): 1.0,
        ("pagebus:experts_unused", "1"): 0, ("pagebus:experts_unused", "3"): 0,
    }  # fmt: skip
    experts.update(np.array([[15, 1, 1, 5], [1, 1, 1, 1]]))
    assert metrics.gauge("pagebus:expert_load_ratio", "", engine="a", layer="1").value == 4.0
    assert metrics.gauge("pagebus:experts_unused", "", engine="a", layer="1").value == 3


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3"])
def test_an_engine_counts_every_token(kind: str, tmp_path: Path) -> None:
    """Each token of a prompt and of its answer goes to so many experts of each layer; of the last layer, those that are
    sampled from do. Without experts there is nothing to count."""
    small = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40} if kind == "qwen3_moe" else {}
    driver = Driver(make_golden(tmp_path, kind, {**small, "num_hidden_layers": 3, "mlp_only_layers": [0]}), **SETTINGS)
    if kind == "qwen3":
        assert driver.engine.expert_tokens() is None
        driver.close()
        return
    scheduler = driver.scheduler(512)
    scheduler.add([5, 6, 7, 8, 9], 4)
    driver.drive(scheduler)
    driver.close()
    experts = driver.engine._experts
    assert experts is not None
    experts.totals()
    with torch.inference_mode():
        experts.fetch(float("inf"))
    totals = driver.engine.expert_tokens()
    assert totals is not None
    assert totals.shape == (2, 8)
    assert totals.sum(1).tolist() == [3 * (5 + 3), 3 * 4]
