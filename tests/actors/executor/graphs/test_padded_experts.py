"""Experts in steps that are padded for CUDA graphs, and in pieces: rows that hold no token read no expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.layers.moe import MixtureOfExperts
from pagebus.actors.model.families.experts.qwen_moe import QWEN2_MOE
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.actors.executor.graphs.test_padded_steps import EagerPieces
from tests.actors.executor.small_engine import MAX_TOKENS, make_prompts, outputs
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, make_golden, reference_generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_golden(tmp_path_factory.mktemp("model"), QWEN2_MOE.model_type, QWEN2_MOE.golden["qwen2-moe"])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(DEFAULTS["vocab_size"])


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return reference_generate(folder, prompts, MAX_TOKENS)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of each call had no token."""
    counts: list[int] = []
    original = MixtureOfExperts.__call__

    def call(self: MixtureOfExperts, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        counts.append(0 if padding is None else int((padding < 0).sum()))
        assert padding is None or len(padding) == len(x)
        return original(self, x, padding)

    monkeypatch.setattr(MixtureOfExperts, "__call__", call)
    return counts


@pytest.mark.parametrize("budget", [3, 16, 40])
def test_padded_steps(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], absent: list[int], budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The tokens are those of transformers, and rows without a token are known as such."""
    use_eager_graphs(driver, monkeypatch, Buckets(6, 40, 4, decodes_apart=True))
    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert max(absent) > 0


@pytest.mark.parametrize("budget", [5, 64])
def test_steps_in_pieces(
    driver: Driver, prompts: list[list[int]], expected: list[list[int]], absent: list[int], budget: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same between attentions that are launched one by one."""
    use_eager_graphs(driver, monkeypatch, Buckets(6, 40, 4, decodes_apart=True))
    runner = driver.engine._loaded.runner
    monkeypatch.setattr(runner, "graphs", EagerPieces(runner.buckets, runner))
    assert outputs(driver, driver.scheduler(budget), prompts) == expected
    assert max(absent) > 0
