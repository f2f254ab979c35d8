"""States of last tokens on CUDA: from graphs as from kernels launched one by one.

Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib
tests/gpu/pooling/test_last_tokens.py``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pagebus.bus.messages import StepResult
from tests.gpu.engine.engine_cases import SETTINGS, make_prompts
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, REFERENCE_CONFIGS, make_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


def pooled(driver: Driver, budget: int) -> dict[int, list[float]]:
    """States of each prompt's last token; every third prompt pools nothing."""
    scheduler, states = driver.scheduler(budget), dict[int, list[float]]()
    for number, prompt in enumerate(make_prompts(DEFAULTS["vocab_size"], 30, seed=4)):
        scheduler.add(prompt, 1, **({"pooled_from": len(prompt) - 1} if number % 3 else {}))

    def collect(result: StepResult) -> None:
        rows = result.pooled_bits.view(np.float32).reshape(len(result.pooled_sequence_ids) or 1, -1)
        states.update(zip(result.pooled_sequence_ids.tolist(), rows.tolist(), strict=False))

    driver.drive(scheduler, on_result=collect)
    return states


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_last_tokens(dtype: str, tolerance: float, tmp_path: Path) -> None:
    """In steps that a graph of the whole step holds, and in larger ones."""
    folder = make_reference(tmp_path, REFERENCE_CONFIGS[0])
    driver = Driver(folder, **SETTINGS | {"dtype": dtype, "swap_space": 0})
    driver.synchronize()
    runner = driver.engine._loaded.runner
    found = [pooled(driver, budget) for budget in (64, 2048)]
    runner.graphs = None
    for budget, states in zip((64, 2048), found, strict=True):
        expected = pooled(driver, budget)
        assert len(expected) == 20
        assert states.keys() == expected.keys()
        for sequence, numbers in expected.items():
            assert states[sequence] == pytest.approx(numbers, abs=tolerance, rel=0)
    driver.close()
