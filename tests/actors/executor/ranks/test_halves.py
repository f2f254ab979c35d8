"""Passes that ranks compute in two halves: right whenever the sums of one are done, and cut alike by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from pagebus.actors.executor.layers.attention_batch import AttentionBatch
from pagebus.actors.executor.models import decoder, halves
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.families.registry import FAMILIES
from tests.actors.executor.models.test_families import prompts_for, reference_tokens
from tests.actors.executor.ranks.test_ranks import COUNT, SMALL, Recorded, answers
from tests.helpers.model_factory import make_golden, make_model
from tests.helpers.ranks.rank_driver import RankDriver, meeting

T = TypeVar("T")
GOLDEN = {next(iter(family.golden)): family for family in FAMILIES}
CUT = ("llama-yarn", "qwen2", "gemma3", "glm4", "starcoder2")
"""Scaled angles, biases, windows and norms of sums, other angles, and norms with a mean."""
NOT_CUT = ("olmo2", "cohere", "qwen3-moe", "deepseek-v2-lite")
"""Exchange within attention, one norm for both parts, experts, latents."""


class Hiding(Recorded):
    """Says that it hides sums."""

    hides = True


class Late(Hiding):
    """Does what is begun beside other work as late as it may be done."""

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        return work


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes of few tokens are cut too; the numbers of tokens of those that were."""
    found: list[int] = []

    def noted(layers: Any, values: torch.Tensor, *more: Any) -> torch.Tensor:
        found.append(len(values))
        return halves.until_last(layers, values, *more)

    monkeypatch.setattr(halves, "LEAST_BYTES", 0)
    monkeypatch.setattr(halves, "ROWS", 8)
    monkeypatch.setattr(decoder, "until_last", noted)
    return found


@pytest.mark.parametrize("kind", [Hiding, Late])
@pytest.mark.parametrize("name", CUT)
def test_tokens_are_those_of_transformers(name: str, kind: type[Hiding], halved: list[int], tmp_path: Path) -> None:
    """Whether a sum is done at once or when it is waited for."""
    family = GOLDEN[name]
    make_golden(tmp_path, family.model_type, family.golden[name])
    prompts = prompts_for(family, name)[1:]
    expected = reference_tokens(tmp_path, prompts, COUNT)
    driver = RankDriver(tmp_path, 2, [kind(comm) for comm in meeting(2)], **SMALL)
    got = answers(driver, prompts)
    driver.close()
    assert [output[: len(known)] for output, known in zip(got, expected, strict=True)] == expected
    assert len(halved) > 2


@pytest.mark.parametrize("name", NOT_CUT)
def test_others_are_not_cut(name: str, tmp_path: Path) -> None:
    family = GOLDEN[name]
    make_golden(tmp_path, family.model_type, family.golden[name])
    layers, (comm, _) = ModelConfig.load(tmp_path).spec.layers, meeting(2)
    assert not halves.may_be_halved(layers, Hiding(comm))


def test_all_ranks_cut_alike(halved: list[int], tmp_path: Path) -> None:
    """What they exchange has the same shapes in the same order, and the same bits."""
    folder = make_model(tmp_path, "llama3", seed=5, num_attention_heads=4, num_key_value_heads=2)
    first, second = comms = [Hiding(comm) for comm in meeting(2)]
    driver = RankDriver(folder, 2, list(comms), **SMALL)
    answers(driver, [[1], list(range(2, 90)), list(range(40))], temperature=1.0, seed=7)
    driver.close()
    assert halved
    assert first.calls == second.calls


def test_passes_of_fixed_shape_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made of these, and whether a rank has one already must not change what it exchanges."""
    monkeypatch.setattr(halves, "LEAST_BYTES", 0)
    many = 4 * halves.ROWS
    ints = torch.zeros(2, dtype=torch.int32)
    prompts = AttentionBatch(ints, ints, ints, ints, ints, num_decodes=1)
    assert halves.is_halved(prompts, many, 2)
    assert not halves.is_halved(prompts, halves.ROWS, 2)
    padded = AttentionBatch(ints, ints, ints, ints, ints, num_decodes=1, decode_lens=ints)
    decodes = AttentionBatch(ints, ints, ints, ints, ints, num_decodes=many)
    assert not halves.is_halved(padded, many, 2)
    assert not halves.is_halved(decodes, many, 2)
