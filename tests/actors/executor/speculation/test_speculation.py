"""The engine with drafts, driven by the scheduler's core: whatever is drafted, the tokens are those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.scheduler.request import SEQUENCE_IDS
from pagebus.bus.messages import StepResult
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.actors.executor.small_engine import SETTINGS, make_prompts
from tests.actors.executor.speculation.drafters import ADVERSARIES, Guess, drafter, oracle
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


def drivers(config: Any, folder: Path) -> Iterator[tuple[Driver, Driver]]:
    """An engine without drafts, and one with."""
    path = make_reference(folder, config)
    lookup = {"spec_method": "ngram", "spec_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    both = Driver(path, **SETTINGS), Driver(path, **SETTINGS, **lookup)
    yield both
    for driver in both:
        driver.close()


@pytest.fixture(scope="module", params=[LLAMA, MISTRAL, QWEN], ids=lambda config: config.name)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    yield from drivers(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    yield from drivers(LLAMA, tmp_path_factory.mktemp("llama"))


def guess_by(driver: Driver, guess: Guess | None) -> None:
    runner = driver.engine._loaded.runner
    assert runner.drafting is not None
    runner.drafting.look_up = runner._ops.look_up_drafts if guess is None else drafter(guess)


def asked(driver: Driver, limits: dict[str, Any] | None = None, **sampling: Any) -> CoreDriver:
    """The prompts, beside each other and after each other."""
    core = CoreDriver(driver, limits=limits, preemption_mode="swap" if limits else "auto")
    for number, prompt in enumerate(PROMPTS):
        core.send(str(number), prompt, NUM_TOKENS, sampling)
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


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_families(family: tuple[Driver, Driver], sampling: dict[str, Any]) -> None:
    """Full attention, windows, and normalised heads."""
    check_with_and_without(family, **sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_kind_of_sampling(llama: tuple[Driver, Driver], sampling: dict[str, Any]) -> None:
    """What reads the sequence's past reads drafts in it, and rules go by each token's own index."""
    check_with_and_without(llama, **sampling)


@pytest.mark.parametrize("guess", ADVERSARIES.values(), ids=ADVERSARIES)
def test_a_drafter_that_is_never_right(llama: tuple[Driver, Driver], guess: Guess) -> None:
    """It costs time, and changes nothing: greedy, at random, and with penalties."""
    plain, drafting = llama
    guess_by(drafting, guess)
    for sampling in ({}, SAMPLINGS["penalties"]):
        assert tokens_of(asked(drafting, **sampling)) == tokens_of(asked(plain, **sampling))


def test_a_drafter_that_is_always_right(llama: tuple[Driver, Driver]) -> None:
    """Steps become fewer, and none computes beyond a sequence's end."""
    plain, drafting = llama
    expected = asked(plain)
    guess_by(drafting, oracle(texts_of(expected)))
    found = asked(drafting)
    assert tokens_of(found) == tokens_of(expected)
    assert len(found.results) < 0.75 * len(expected.results)


def test_few_blocks(llama: tuple[Driver, Driver]) -> None:
    """Sequences are preempted with drafts in flight, and come back from the host."""
    plain, drafting = llama
    expected = asked(plain)
    guess_by(drafting, oracle(texts_of(expected), 0.25))
    found = asked(drafting, {"num_blocks": 9})
    assert [answer.tokens for answer in found.answers.values()] == tokens_of(expected)
    assert found.preempted


def test_what_was_drafted_is_found_in_the_cache(llama: tuple[Driver, Driver]) -> None:
    """A prompt that goes on with an answer finds its blocks, which hold nothing of rejected drafts."""
    plain, drafting = llama
    expected = asked(plain)
    texts = texts_of(expected)
    guess_by(drafting, oracle(texts, 0.25))
    found = asked(drafting)
    for core in (expected, found):
        for number, text in enumerate(texts):
            core.send(f"again {number}", text, 5)
        core.run()
    assert tokens_of(found) == tokens_of(expected)
    cached = [answer.cached for name, answer in found.answers.items() if name.startswith("again")]
    assert cached == [(len(text) - 1) // 16 * 16 for text in texts]


def test_log_probabilities(llama: tuple[Driver, Driver]) -> None:
    """Those of accepted tokens, and of no others."""
    expected, found = check_with_and_without(llama, logprobs=3, **SEEDED)
    (bits, tops), (wanted, wanted_tops) = scores_of(found.results), scores_of(expected.results)
    assert bits.keys() == wanted.keys()
    assert len(bits) == len(PROMPTS) * NUM_TOKENS
    assert np.allclose([bits[key] for key in wanted], list(wanted.values()), atol=1e-4)
    assert tops == wanted_tops


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


def test_several_choices_and_beams_beside(llama: tuple[Driver, Driver]) -> None:
    """Choices draft each for themselves; beams never do."""
    guess_by(llama[1], None)
    cores = [CoreDriver(driver) for driver in llama]
    for core in cores:
        core.send("choices", [9, 8, 7, 6] * 5, NUM_TOKENS, {"n": 3, "temperature": 0.4, "seed": 3})
        core.send("beams", [9, 8, 7, 6] * 4, 8, {"beam_width": 2, "n": 2})
        core.send("one", [3] * 30, NUM_TOKENS)
        core.run()
    assert tokens_of(cores[1]) == tokens_of(cores[0])
    assert cores[1].answers["beams"].beams == cores[0].answers["beams"].beams != []


@pytest.mark.parametrize("sampling", [SEEDED, SAMPLINGS["penalties"]], ids=["seeded", "penalties"])
def test_padded_steps(llama: tuple[Driver, Driver], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with drafts are rows of prompts in the graphs there are: nothing is captured for them."""
    plain, drafting = llama
    expected = asked(plain, **sampling)
    guess_by(drafting, oracle(texts_of(expected), 0.25))
    graphs = use_eager_graphs(drafting, monkeypatch, Buckets(6, 64, 4, max_samples=30))
    found = asked(drafting, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    drafted = [plan for plan in found.plans if (plan.num_scheduled > 1).any() and not plan.new_sequences]
    assert drafted
    assert any(bucket.spans and bucket.rows > 6 for bucket in graphs.replayed)
