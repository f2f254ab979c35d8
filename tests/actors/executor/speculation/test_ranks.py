"""Ranks with drafts: each drafts what all draft, from tokens that are the same on all, and none drifts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.actors.executor.speculation.checks import LLAMA, SAMPLINGS, SEEDED, accepted, asked, texts_of, tokens_of
from tests.actors.executor.speculation.constrained import LETTERS, PROMPT, SHIPPED, following
from tests.actors.executor.speculation.drafters import ADVERSARIES, Guess, drafter, oracle
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_reference
from tests.helpers.ranks.rank_driver import RankDriver

pytestmark = pytest.mark.share(6)

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 128, "max_num_seqs": 6, "block_size": 16,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60,
}  # fmt: skip
LOOKUP: dict[str, Any] = {"spec_method": "ngram", "spec_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, RankDriver]]:
    """One rank without drafts, and two with."""
    path = make_reference(tmp_path_factory.mktemp("model"), LLAMA)
    drivers = Driver(path, **SETTINGS, spec_method="none"), RankDriver(path, 2, **SETTINGS, **LOOKUP)
    yield drivers
    for driver in drivers:
        driver.close()


def guess_on_all(driver: RankDriver, guesses: list[Guess] | None) -> None:
    for number, engine in enumerate(driver.engines):
        runner = engine._loaded.runner
        assert runner.drafting is not None
        runner.drafting.look_up = runner._ops.look_up_drafts if guesses is None else drafter(guesses[number])


@pytest.mark.parametrize(
    "sampling", [{}, SEEDED, SAMPLINGS["penalties"], SAMPLINGS["limits"], {"logprobs": 2, **SEEDED}],
    ids=["greedy", "seeded", "penalties", "limits", "logprobs"],
)  # fmt: skip
def test_ranks_with_drafts_give_the_tokens_of_one_without(
    both: tuple[Driver, RankDriver], sampling: dict[str, Any]
) -> None:
    """By lookup, and with drafts of which one in four is wrong. Ranks that drift end with an error."""
    one, two = both
    expected = asked(one, **sampling)
    guess_on_all(two, None)
    assert tokens_of(asked(two, **sampling)) == tokens_of(expected)
    guess_on_all(two, [oracle(texts_of(expected), 0.25) for _ in two.engines])
    found = asked(two, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    assert accepted(found) > 6


@pytest.mark.parametrize("guess", ADVERSARIES.values(), ids=ADVERSARIES)
def test_wrong_drafts_on_ranks(both: tuple[Driver, RankDriver], guess: Guess) -> None:
    """They change nothing."""
    one, two = both
    guess_on_all(two, [guess, guess])
    assert tokens_of(asked(two, **SEEDED)) == tokens_of(asked(one, **SEEDED))


def test_grammars_on_ranks() -> None:
    """Each rank follows the grammar along the drafts, and bans the tokens of its part of the vocabulary."""
    one, two = Driver(SHIPPED, **SETTINGS, spec_method="none"), RankDriver(SHIPPED, 2, **SETTINGS, **LOOKUP)
    grammar = following(**LETTERS) | {"ignore_eos": True}
    wanted = [{"temperature": 1.0, "seed": 3, **grammar}, {**grammar}]

    def run(driver: Driver) -> CoreDriver:
        core = CoreDriver(driver)
        for number, sampling in enumerate(wanted):
            core.send(str(number), PROMPT, 24, sampling)
        core.run()
        return core

    expected = run(one)
    guess_on_all(two, [oracle([PROMPT + tokens for tokens in tokens_of(expected)], 0.25) for _ in two.engines])
    found = run(two)
    for driver in (one, two):
        driver.close()
    assert tokens_of(found) == tokens_of(expected)
    assert accepted(found) > 10
