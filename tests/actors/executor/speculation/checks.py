"""Engines with drafts and without beside each other, asked the same: their tokens are to be the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pagebus.actors.scheduler.core.lifecycle import SEQUENCE_IDS
from pagebus.bus.messages import StepResult
from tests.actors.executor.small_engine import SETTINGS, make_prompts
from tests.actors.executor.speculation.drafters import Guess, drafter, oracle
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference

LLAMA, MISTRAL, QWEN = (
    next(config for config in REFERENCE_CONFIGS if config.name == name)
    for name in ("llama3-6q2kv-d64", "mistral-7q1kv-d80", "qwen3-4q2kv-d128")
)
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 7}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "limits": {"temperature": 1.3, "seed": 3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5,
                  "frequency_penalty": 0.4},
    "bad words": {"bad_words_token_ids": ((11, 12), (5,), (250, 3, 9)), **SEEDED},
    "bias": {"logit_bias": {5: 4.0, 17: -3.0}, "temperature": 0.8, "seed": 2},
    "ends": {"ignore_eos": False, "stop_token_ids": tuple(range(0, 300, 9)), "min_tokens": 7, "temperature": 1.0,
             "seed": 1},
    "allowed": {"allowed_token_ids": tuple(range(40)), "temperature": 1.0, "seed": 4},
}  # fmt: skip
NUM_TOKENS = 18
PROMPTS = [*make_prompts(290, count=4, seed=4), [9, 8, 7, 6] * 6, [3] * 20]


def drivers(config: Any, folder: Path, **settings: Any) -> Iterator[tuple[Driver, Driver]]:
    """An engine of a new model without drafts, and one with."""
    yield from drivers_of(make_reference(folder, config), **settings)


def drivers_of(path: Path, **settings: Any) -> Iterator[tuple[Driver, Driver]]:
    """An engine of this model without drafts, and one with."""
    given = SETTINGS | settings
    lookup = {"spec_method": "ngram", "spec_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    both = Driver(path, **given, spec_method="none"), Driver(path, **given, **lookup)
    yield both
    for driver in both:
        driver.close()


def guess_by(driver: Driver, guess: Guess | None) -> None:
    runner = driver.engine._loaded.runner
    assert runner.drafting is not None
    runner.drafting.look_up = runner._ops.look_up_drafts if guess is None else drafter(guess)


def asked(
    driver: Driver,
    limits: dict[str, Any] | None = None,
    *,
    predictions: list[list[int]] | None = None,
    **sampling: Any,
) -> CoreDriver:
    """The prompts, beside each other and after each other, perhaps with what is predicted for each."""
    core = CoreDriver(driver, limits=limits, preemption_mode="swap" if limits else "auto")
    core.ignore_times()
    for number, prompt in enumerate(PROMPTS):
        told = {} if predictions is None else {"prediction_token_ids": np.array(predictions[number], np.int32)}
        core.send(str(number), prompt, NUM_TOKENS, sampling, **told)
    core.run()
    return core


def tokens_of(core: CoreDriver) -> list[list[int]]:
    """Of each sequence, in the order of their ids."""
    found: dict[int, list[int]] = {}
    for result in core.results:
        for sequence, token in zip(result.sequence_ids.tolist(), result.token_ids.tolist(), strict=True):
            found.setdefault(sequence, []).append(token)
    return [found[sequence] for sequence in sorted(found)]


def texts_of(core: CoreDriver) -> list[list[int]]:
    """Prompts with what follows them."""
    return [prompt + answer.tokens for prompt, answer in zip(PROMPTS, core.answers.values(), strict=True)]


def accepted(core: CoreDriver) -> int:
    return core.replica.step_results.acceptance.num_accepted


def check_with_and_without(both: tuple[Driver, Driver], **sampling: Any) -> tuple[CoreDriver, CoreDriver]:
    """With the lookup, and with drafts of which one in four is wrong; the latter is returned."""
    plain, drafting = both
    expected = asked(plain, **sampling)
    guess_by(drafting, None)
    assert tokens_of(asked(drafting, **sampling)) == tokens_of(expected)

    guess_by(drafting, oracle(texts_of(expected), 0.25))
    found = asked(drafting, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    assert accepted(found) > len(PROMPTS)
    return expected, found


def scores_of(results: list[StepResult]) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], list[int]]]:
    """By sequence and index: the token's own log probability, and the likeliest tokens."""
    own, tops = {}, {}
    for result in results:
        ends = np.cumsum(result.top_counts)
        for place, row in enumerate(result.logprob_rows.tolist()):
            key = int(result.sequence_ids[row]) % SEQUENCE_IDS, int(result.token_indexes[row])
            own[key] = float(result.logprob_bits[place : place + 1].view(np.float32)[0])
            tops[key] = result.top_ids[ends[place] - result.top_counts[place] : ends[place]].tolist()
    return own, tops
