"""The engine with drafts, driven by the scheduler's core: whatever is drafted, the tokens are those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.actors.executor.drafters import Guess, drafter, oracle
from tests.actors.executor.small_engine import SETTINGS, make_prompts
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference

CONFIGS = [config for config in REFERENCE_CONFIGS if config.name in ("llama3-6q2kv-d64", "mistral-7q1kv-d80",
                                                                     "qwen3-4q2kv-d128")]  # fmt: skip
GREEDY: dict[str, Any] = {}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": {"temperature": 0.9, "seed": 7},
    "limits": {"temperature": 1.3, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5,
                  "frequency_penalty": 0.4},
    "bad words": {"bad_words_token_ids": ((11, 12), (5,), (250, 3, 9))},
    "bias": {"logit_bias": {5: 4.0, 17: -3.0}, "temperature": 0.8, "seed": 2},
    "ends": {"ignore_eos": False, "stop_token_ids": tuple(range(0, 300, 9)), "min_tokens": 7, "temperature": 1.0,
             "seed": 1},
    "allowed": {"allowed_token_ids": tuple(range(40)), "temperature": 1.0, "seed": 4},
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[Driver]:
    driver = Driver(folder, **SETTINGS, spec_method="ngram", spec_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
    yield driver
    driver.close()


def guess_by(driver: Driver, guess: Guess | None) -> None:
    runner = driver.engine._loaded.runner
    assert runner.drafting is not None
    runner.drafting.look_up = runner._ops.look_up_drafts if guess is None else drafter(guess)


def answers(driver: Driver, limits: dict[str, Any] | None = None, depth: int = 2, **sampling: Any) -> CoreDriver:
    """Prompts of every kind, some beside each other and some after each other."""
    core = CoreDriver(driver, limits=limits, depth=depth)
    for number, prompt in enumerate(prompts()):
        core.send(str(number), prompt, 24, sampling)
    core.run()
    return core


def prompts() -> list[list[int]]:
    return [*make_prompts(290, count=7, seed=4), [9, 8, 7, 6] * 9, [3] * 20]


def tokens_of(core: CoreDriver) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in core.answers.items()}


def texts_of(core: CoreDriver) -> list[list[int]]:
    """Prompts with what follows them."""
    return [prompt + answer.tokens for prompt, answer in zip(prompts(), core.answers.values(), strict=True)]


def accepted(core: CoreDriver) -> int:
    return core.replica.step_results.acceptance.num_accepted


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_are_those_without_drafts(plain: Driver, drafting: Driver, sampling: dict[str, Any]) -> None:
    """With the lookup, and with drafts of which one in four is wrong, and most are accepted."""
    expected = answers(plain, **sampling)
    guess_by(drafting, None)
    assert tokens_of(answers(drafting, **sampling)) == tokens_of(expected)

    guess_by(drafting, oracle(texts_of(expected), 0.25))
    found = answers(drafting, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    assert accepted(found) > sum(map(len, tokens_of(found).values())) // 4
