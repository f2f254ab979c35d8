"""Ranks among which experts are divided as a whole: transformers' tokens, and what each rank is told by routing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.family import Family
from pagebus.actors.model.spec import Moe
from tests.actors.executor.loading.formats.test_gpt_oss import small_gpt_oss
from tests.actors.executor.models.test_families import prompts_for, reference_tokens
from tests.actors.executor.ranks.test_ranks import COUNT, SMALL, Recorded, answers
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden
from tests.helpers.quantized.checkpoints import change, quantize
from tests.helpers.quantized.packers import PACKERS, Tensors
from tests.helpers.ranks.rank_driver import RankDriver, meeting
from tests.helpers.ranks.stage_driver import StageDriver

pytestmark = pytest.mark.share(6)

APART = SMALL | {"enable_expert_parallel": True}
CASES = (
    ("qwen3-moe", 2), ("mixtral", 2), ("mixtral", 4), ("deepseek-v2", 2), ("deepseek-v3", 4), ("gpt-oss", 2),
    ("gpt-oss", 4), ("llama4", 4), ("granite-shared-odd", 4), ("qwen2-moe-odd", 2),
)  # fmt: skip
"""Among them 5, 6 and 7 experts on four ranks, shared experts with and without gates, groups, biases, choices with a
bias, weights on inputs; files with each expert by itself and with all in one tensor."""


def golden(name: str, folder: Path) -> tuple[Family, Path]:
    family = next(family for family in FAMILIES if name in family.golden)
    return family, make_golden(folder, family.model_type, family.golden[name])


def counts_of(driver: RankDriver) -> list[torch.Tensor]:
    """[L, E] of each rank: how many tokens chose each expert."""
    return [torch.stack(engine._loaded.runner.model.parameters.counts) for engine in driver.engines]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_tokens_are_those_of_transformers(name: str, world: int, tmp_path: Path) -> None:
    """And what ranks exchange has the same bits on all, so their residual streams have."""
    family, folder = golden(name, tmp_path)
    prompts = prompts_for(family, name)[1:]
    expected = reference_tokens(folder, prompts, COUNT)
    comms = [Recorded(comm) for comm in meeting(world)]
    driver = RankDriver(folder, world, list(comms), **APART)
    got = answers(driver, prompts)
    counts = counts_of(driver)
    driver.close()
    assert [output[: len(known)] for output, known in zip(got, expected, strict=True)] == expected
    assert all(comm.calls == comms[0].calls for comm in comms)
    assert all(torch.equal(each, counts[0]) for each in counts)


def test_experts_lie_on_one_rank_each(tmp_path: Path) -> None:
    """Whole, with the width of the model; attention and the shared expert have a part of theirs."""
    _, folder = golden("deepseek-v2-odd", tmp_path)
    driver = RankDriver(folder, 4, **APART)
    configs = [engine._loaded.runner.model.config for engine in driver.engines]
    driver.close()
    feeds = [config.spec.layers[-1].feed for config in configs]
    assert all(isinstance(feed, Moe) for feed in feeds)
    assert [feed.own for feed in feeds if isinstance(feed, Moe)] == [range(1), range(1, 3), range(3, 5), range(5, 7)]
    assert configs[0].shard is not None
    whole = configs[0].shard.whole.layers[-1].feed
    assert isinstance(whole, Moe)
    assert whole.shared is not None
    assert {feed.width for feed in feeds} == {whole.width}
    assert sum(feed.shared.width for feed in feeds if isinstance(feed, Moe) and feed.shared) == whole.shared.width


def test_a_rank_none_of_whose_experts_is_chosen(tmp_path: Path) -> None:
    """The router's bias keeps all tokens away from the experts of rank 1, which adds nothing."""
    family, folder = golden("gpt-oss", tmp_path)

    def repel(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("router.bias")]:
            tensors[name][3:] = -1e4

    change(folder, repel)
    prompts = prompts_for(family, "gpt-oss")[1:]
    expected = reference_tokens(folder, prompts, COUNT)
    driver = RankDriver(folder, 2, **APART)
    got = answers(driver, prompts)
    for counts in counts_of(driver):
        assert counts[:, :3].sum() > 0
        assert counts[:, 3:].sum() == 0
    driver.close()
    assert [output[: len(known)] for output, known in zip(got, expected, strict=True)] == expected


def test_counts_are_those_of_one_rank(tmp_path: Path) -> None:
    """Every rank counts the choices of all experts, not of its own alone."""
    _, folder = golden("qwen3-moe", tmp_path)
    prompts = [[1, 2, 3], list(range(40))]
    one, two = Driver(folder, **SMALL), RankDriver(folder, 2, **APART)
    assert answers(one, prompts) == answers(two, prompts)
    alone = torch.stack(one.engine._loaded.runner.model.parameters.counts)
    assert all(torch.equal(each, alone) for each in counts_of(two))
    one.close()
    two.close()


@pytest.mark.parametrize("name", ["gpt-oss", "fp8-blocks", "ct-int4-zeros"])
def test_quantized_experts(name: str, tmp_path: Path) -> None:
    """Five in one tensor, or six by themselves, with a width that ranks could not divide: 48 with groups of 16."""
    if name == "gpt-oss":
        folder = small_gpt_oss(tmp_path)[0]
    else:
        fields = {
            "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        }  # fmt: skip
        folder = quantize(make_golden(tmp_path / "model", "qwen3_moe", fields), tmp_path, PACKERS[name])[0]
    prompts = [[1, 2, 3], list(range(40))]
    one, ranks = Driver(folder, **SMALL), RankDriver(folder, 2, **APART)
    assert answers(ranks, prompts) == answers(one, prompts)
    one.close()
    ranks.close()


def test_stages_of_ranks(tmp_path: Path) -> None:
    """Two stages of two ranks, with 13 experts: all ranks divide the layers alike."""
    family, folder = golden("qwen3-moe-odd", tmp_path)
    prompts = prompts_for(family, "qwen3-moe-odd")[1:]
    expected = reference_tokens(folder, prompts, COUNT)
    driver = StageDriver(folder, 2, 2, **APART)
    got = answers(driver, prompts)
    driver.close()
    assert [output[: len(known)] for output, known in zip(got, expected, strict=True)] == expected
