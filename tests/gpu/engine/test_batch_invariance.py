"""With `--deterministic`, what a request is answered does not depend on others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.engine.engine_cases import BFLOAT16_SHAPE, SETTINGS
from tests.gpu.engine_checks import check_independence
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["llama3", "qwen3"])
def test_deterministic_requests_do_not_know_each_other(arch: str, dtype: str, tmp_path: Path) -> None:
    """Tokens and every bit of their log probabilities: 64 at once under budgets that cut prompts anywhere, down to
    single tokens, or each alone; and of those that are preempted, as if nothing had happened."""
    folder = make_model(tmp_path, arch, seed=22, **BFLOAT16_SHAPE)
    driver = Driver(folder, **SETTINGS | {"dtype": dtype, "deterministic": True, "max_num_seqs": 64})
    check_independence(driver)
    driver.close()
