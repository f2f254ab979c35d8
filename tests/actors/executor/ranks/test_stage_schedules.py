"""A pipeline behind the real scheduler: lanes, prefix hits, preemption, swap and pages of layers with windows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagebus.actors.model.families.registry import FAMILIES
from tests.actors.executor.memory.test_swap import MAX_TOKENS, SETTINGS, make_prompts
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_golden, make_reference, reference_generate
from tests.helpers.ranks.stage_driver import StageDriver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[3])


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[StageDriver]:
    driver = StageDriver(folder, 2, **SETTINGS)
    yield driver
    driver.close()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_give_the_same_tokens(mode: str, driver: Driver, folder: Path) -> None:
    """Ten sequences over twelve blocks: each token is transformers'."""
    prompts = make_prompts()
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    core = CoreDriver(driver, preemption_mode=mode)
    answers = [core.send(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)]
    core.run()
    assert [answer.tokens for answer in answers] == expected
    assert core.preempted
    assert any(each.swapped for each in core.preempted) == (mode == "swap")
    assert not any(core.core.leftovers().values())


def test_a_cached_prefix_is_not_computed_again(driver: Driver, folder: Path) -> None:
    prompt = list(range(90, 160))
    core = CoreDriver(driver)
    first = core.send("first", prompt, 4)
    core.run()
    second = core.send("second", prompt, 4)
    core.run()
    assert second.tokens == first.tokens == reference_generate(folder, [prompt], 4)[0]
    assert second.cached == 64


def test_beams_are_those_of_one_rank(driver: Driver, folder: Path) -> None:
    """They fork, take over each other's tokens, and are told their next tokens by the plan."""
    one, told = Driver(folder, **SETTINGS | {"spec_method": "none"}), []
    for each in (one, driver):
        core = CoreDriver(each)
        answer = core.send("beams", list(range(20)), 8, {"beam_width": 3, "n": 3})
        core.run()
        told.append(answer.beams)
    one.close()
    assert len(told[0]) == 3
    assert told[1] == told[0]


def test_decodes_keep_both_stages_busy(driver: Driver) -> None:
    """Six sequences decode in two lanes of three, which take turns."""
    core = CoreDriver(driver, limits={"num_blocks": 12}, enable_prefix_caching=False)
    for i in range(6):
        core.send(f"r{i}", [i + 1] * 4, 20)
    core.run()
    decodes = [set(plan.slots.tolist()) for plan in core.plans if plan.num_decodes == len(plan.slots) == 3]
    assert len(decodes) > 20
    assert all(not one & other for one, other in itertools.pairwise(decodes))


def test_layers_with_windows_in_pages_of_their_own(tmp_path: Path) -> None:
    """Given back as the window moves on, in both stages."""
    family = next(family for family in FAMILIES if "gemma3" in family.golden)
    folder = make_golden(tmp_path, family.model_type, family.golden["gemma3"])
    prompts = [[token % 90 for token in prompt] for prompt in make_prompts(8)]
    expected = reference_generate(folder, prompts, MAX_TOKENS)
    driver = StageDriver(folder, 2, grouped=True, **SETTINGS | {"num_gpu_blocks_override": 26})
    assert driver.info.windowed_pages
    core = CoreDriver(driver, preemption_mode="swap")
    answers = [core.send(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(prompts)]
    core.run()
    driver.close()
    assert [answer.tokens for answer in answers] == expected
    assert core.replica.counts.num_given_back
    assert core.preempted
