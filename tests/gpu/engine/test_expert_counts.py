"""Tokens by expert on CUDA: from graphs and without, rows of padding do not count.

Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib
tests/gpu/engine/test_expert_counts.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.engine.engine_cases import SETTINGS
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
PROMPT, ANSWER, TOP_K = 5, 4, 3
FIELDS = {"num_experts": 8, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 40, "num_hidden_layers": 3}


@pytest.mark.parametrize("eager", [False, True])
def test_every_token_counts_once(eager: bool, tmp_path: Path) -> None:
    """Each token but the last one sampled, in every layer; in the last layer those that are sampled from."""
    folder = make_golden(tmp_path, "qwen3_moe", FIELDS)
    driver = Driver(folder, **SETTINGS | {"enforce_eager": eager})
    before = [counts.clone() for counts in driver.engine._loaded.runner.model.parameters.counts]
    scheduler = driver.scheduler(2048)
    for _ in range(3):
        scheduler.add([5, 6, 7, 8, 9], ANSWER)
    driver.drive(scheduler)
    driver.synchronize()
    found = [
        int((now - then).sum())
        for now, then in zip(driver.engine._loaded.runner.model.parameters.counts, before, strict=True)
    ]
    whole = 3 * TOP_K * (PROMPT + ANSWER - 1)
    assert found[:2] == [whole, whole]
    assert found[2] == 3 * TOP_K * ANSWER
    totals = driver.engine.expert_tokens()
    assert totals is not None
    assert totals.shape == (3, 8)
    driver.close()
