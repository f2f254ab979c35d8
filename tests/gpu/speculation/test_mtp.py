"""MTP layers on CUDA: tokens are those without, and in float32 drafts are those of the reference.

Runs on a bare GPU host as ``tests/gpu/speculation/test_speculation.py`` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import SAMPLINGS, accepted, asked, tokens_of
from tests.actors.executor.speculation.test_heads import SAMPLED, drafted
from tests.actors.executor.speculation.test_mtp import MTP, check, made
from tests.gpu.speculation.test_heads import check_passes_from_graphs
from tests.helpers.engine_driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("name", ["deepseek", "glm"])
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "no graphs"])
def test_tokens_are_those_without(name: str, eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, name)
    told: dict[str, Any] = {"device": "cuda", "num_gpu_blocks_override": 100, "swap_space": 0, "enforce_eager": eager}
    plain, drafting = Driver(folder, **SETTINGS | told, spec_method="none"), Driver(folder, **SETTINGS | told, **MTP)
    for driver in (plain, drafting):
        driver.synchronize()
    for sampling in ({}, SAMPLED, SAMPLINGS["penalties"]):
        found = asked(drafting, **sampling)
        assert tokens_of(found) == tokens_of(asked(plain, **sampling))
        assert sampling or accepted(found) > 0
    watched = drafted(drafting, monkeypatch)
    asked(drafting, **SAMPLED)
    check(watched[:16], folder)
    if not eager:
        check_passes_from_graphs(drafting, monkeypatch)
    plain.close()
    drafting.close()
