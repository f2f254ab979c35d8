"""Engines of the stages of a pipeline: transformers' tokens, one rank's samples; when one is lost, all end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagebus.actors.executor.device.errors import EngineError
from pagebus.actors.executor.models.decoder import as_decoder
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.shards.stages import staged_config
from pagebus.bus.messages import StepResult
from tests.actors.executor.models.test_families import prompts_for, reference_tokens
from tests.actors.executor.ranks.test_ranks import COUNT, SAMPLED, SMALL, answers
from tests.actors.executor.sampling.test_grammars import LETTERS, PROMPT, SHIPPED, constrained
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden, make_model
from tests.helpers.oracle import make_oracle
from tests.helpers.ranks.stage_driver import StageDriver

pytestmark = pytest.mark.share(6)

ONE_WIDE = ("llama-yarn", "qwen2-tied", "gemma2", "cohere2", "gpt-oss", "qwen3-moe", "deepseek-v2", "minicpm3")
TWO_WIDE = ("qwen2", "gpt-oss", "deepseek-v2")


def check_family(name: str, stages: int, width: int, folder: Path) -> None:
    family = next(family for family in FAMILIES if name in family.golden)
    make_golden(folder, family.model_type, family.golden[name])
    prompts = prompts_for(family, name)[1:]
    expected = reference_tokens(folder, prompts, COUNT)
    driver = StageDriver(folder, stages, width, **SMALL)
    got = answers(driver, prompts)
    driver.close()
    assert [output[: len(known)] for output, known in zip(got, expected, strict=True)] == expected


@pytest.mark.parametrize("name", ONE_WIDE)
def test_two_stages_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Tied heads, windows, sinks, parts that share a norm, experts, latents; prompts in chunks."""
    check_family(name, 2, 1, tmp_path)


@pytest.mark.parametrize("name", TWO_WIDE)
def test_two_stages_of_two_ranks_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    check_family(name, 2, 2, tmp_path)


def test_three_stages_sample_what_one_rank_samples(tmp_path: Path) -> None:
    """The same numbers go through the same layers: equal to the bit, also in the order of tokens' ends."""
    folder = make_model(tmp_path, "qwen3", seed=6, num_hidden_layers=4)
    prompts = [[1], list(range(2, 90)), list(range(40))]
    one, three = Driver(folder, **SMALL | {"spec_method": "none"}), StageDriver(folder, 3, **SMALL)
    for params in SAMPLED:
        assert answers(three, prompts, **params) == answers(one, prompts, **params)
    layers = [len(as_decoder(engine._loaded.runner.model).layers) for engine in three.engines]
    assert sum(layers) == 4
    assert three.info.block_bytes == one.info.block_bytes * max(layers) // 4
    for driver in (one, three):
        driver.close()


def test_stages_keep_to_grammars_masks_and_lists() -> None:
    wanted: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3, **constrained(**LETTERS)},
        {"temperature": 1.0, "seed": 4, "allowed_token_ids": (7, 300, 2047, 2048, 2049, 4000)},
        {"temperature": 0.8, "seed": 5, "bad_words_token_ids": ((100,), (5, 3000)), "logit_bias": {2500: 9.0, 9: 8.0}},
    ]
    told = []
    for made in (Driver, StageDriver):
        driver = made(SHIPPED, *((2,) if made is StageDriver else ()), **SMALL)
        scheduler = driver.scheduler(64)
        sequences = [scheduler.add(PROMPT, COUNT, **params) for params in wanted]
        driver.drive(scheduler)
        driver.close()
        told.append([sequence.output for sequence in sequences])
    assert told[0] == told[1]


def test_logprobs_are_those_of_one_rank(tmp_path: Path) -> None:
    """Of sampled tokens and of prompts, which are computed in pieces."""
    folder = make_model(tmp_path, "llama3", seed=7)
    told: list[list[StepResult]] = []
    for driver in (Driver(folder, **SMALL | {"spec_method": "none"}), StageDriver(folder, 2, **SMALL)):
        results: list[StepResult] = []
        scheduler = driver.scheduler(64)
        scheduler.add(list(range(80)), 8, logprobs=2, prompt_logprobs=2)
        driver.drive(scheduler, on_result=results.append)
        driver.close()
        told.append(results)
    for one, two in zip(*told, strict=True):
        assert two.logprob_bits.tolist() == one.logprob_bits.tolist()
        assert two.prompt_bits.tolist() == one.prompt_bits.tolist()
    assert sum(len(result.prompt_bits) for result in told[1]) == 79


def test_layers_with_windows_have_pages_of_their_own_in_each_stage(tmp_path: Path) -> None:
    """As many as in the whole model, which the scheduler plans for; a stage may have no layer for some of them."""
    family = next(family for family in FAMILIES if "gemma3" in family.golden)
    make_golden(tmp_path, family.model_type, family.golden["gemma3"])
    whole = replace(ModelConfig.load(tmp_path), grouped=True)
    for stage in range(2):
        part = staged_config(whole, stage, 2)
        groups = part.cache_groups
        assert groups.windowed_pages == whole.cache_groups.windowed_pages
        assert groups.windowed_tokens == whole.cache_groups.windowed_tokens
        assert len(set(groups.layers)) == len(groups.layers) == part.num_layers
        for (page, place), layer in zip(groups.layers, part.spec.layers, strict=True):
            assert 0 <= place < groups.page_layers
            assert (page > 0) == (groups.windowed_pages > 0 and bool(layer.mixer.reach))


def test_a_stage_reads_its_own_layers_alone(tmp_path: Path) -> None:
    """The embedding is the first one's, and of the last if it is the head too."""
    folder = make_model(tmp_path, "qwen3", seed=6, num_hidden_layers=4)
    driver = StageDriver(folder, 2, **SMALL)
    names = [set(engine._loaded.runner.model.parameters.views) for engine in driver.engines]
    driver.close()
    last, first = names
    assert "model.embed_tokens.weight" in first
    assert not first & last - {"model.embed_tokens.weight"}
    assert {"model.norm.weight"} <= last
    assert "model.norm.weight" not in first


def test_a_lost_stage_ends_the_others(tmp_path: Path) -> None:
    """Who waits for it hears of it at once, by its number."""
    folder = make_model(tmp_path, "llama2", seed=11)
    driver = StageDriver(folder, 2, **SMALL)
    assert driver.engines[1].stop()
    scheduler = driver.scheduler(64)
    scheduler.add(list(range(20)), 8)
    plan = scheduler.plan()
    assert plan is not None
    driver.engines[0].submit(plan, 1)
    with pytest.raises(EngineError, match="rank 0 has lost rank 1"):
        driver.result()
    assert driver.engines[0].stop()


def test_stages_that_were_told_different_things_end(tmp_path: Path) -> None:
    """At that step, before a token of it is told."""
    folder = make_model(tmp_path, "llama2", seed=11)
    driver = StageDriver(folder, 2, **SMALL)
    scheduler = driver.scheduler(64)
    scheduler.add(list(range(20)), 8)
    plan = scheduler.plan()
    assert plan is not None
    driver.engines[0].submit(plan, 1)
    driver.engines[1].submit(msgspec.structs.replace(plan, new_token_ids=plan.new_token_ids + 1), 1)
    with pytest.raises(EngineError, match="drifted apart"):
        driver.result()
    for engine in driver.engines:
        assert engine.stop()


def test_the_oracle_has_stages_too(tmp_path: Path) -> None:
    """Each makes its cache of what was passed on, so that tests of groups see mixed-up messages."""
    folder = make_oracle(tmp_path, step_ms=2)
    settings: dict[str, Any] = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 8, "swap_space": 0}
    settings["num_gpu_blocks_override"] = 80
    prompts = [[1], list(range(2, 90)), list(range(40))]
    one, two = Driver(folder, **settings), StageDriver(folder, 2, **settings)
    assert answers(two, prompts) == answers(one, prompts)
    one.close()
    two.close()
