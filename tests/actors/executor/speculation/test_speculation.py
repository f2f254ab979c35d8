"""The engine with drafts, driven by the scheduler's core: whatever is drafted, the tokens are those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.loading import loading
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.actors.executor.speculation.checks import (
    LLAMA,
    MISTRAL,
    NUM_TOKENS,
    PROMPTS,
    QWEN,
    SAMPLINGS,
    SEEDED,
    accepted,
    asked,
    check_with_and_without,
    drivers,
    guess_by,
    scores_of,
    texts_of,
    tokens_of,
)
from tests.actors.executor.speculation.drafters import ADVERSARIES, Guess, oracle
from tests.actors.scheduler.rests import is_rest, rest_often
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver

pytestmark = pytest.mark.share(6)


@pytest.fixture(scope="module", params=[LLAMA, MISTRAL, QWEN], ids=lambda config: config.name)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    yield from drivers(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    yield from drivers(LLAMA, tmp_path_factory.mktemp("llama"))


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


def test_predictions(llama: tuple[Driver, Driver]) -> None:
    """What a client predicts is drafted from the first token on, as far as it comes true; and beyond a mistake."""
    plain, drafting = llama
    expected = asked(plain, **SEEDED)
    wrong = [[*answer[:7], 5, *answer[8:]] for answer in tokens_of(expected)]
    guess_by(drafting, None)
    runs = {}
    for name, predictions in {"none": None, "right": tokens_of(expected), "with a mistake": wrong}.items():
        runs[name] = asked(drafting, predictions=predictions, **SEEDED)
        assert tokens_of(runs[name]) == tokens_of(expected)
    assert accepted(runs["right"]) > accepted(runs["with a mistake"]) > accepted(runs["none"]) + len(PROMPTS)
    assert accepted(runs["right"]) > 0.6 * len(PROMPTS) * NUM_TOKENS
    few = asked(drafting, {"num_blocks": 9}, predictions=tokens_of(expected), **SEEDED)
    assert [answer.tokens for answer in few.answers.values()] == tokens_of(expected)
    assert few.preempted


def test_decodes_as_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``--deterministic`` lays them out, which a CPU refuses only because its products are not bitwise the same."""
    monkeypatch.setattr(loading, "check_attention", lambda settings, device: None)
    for both in drivers(LLAMA, tmp_path, deterministic=True):
        assert not both[1].engine._loaded.runner._decodes_apart
        check_with_and_without(both, **SEEDED)
        check_with_and_without(both, **SAMPLINGS["penalties"])


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
@pytest.mark.parametrize("max_verified", [0, 30])
def test_padded_steps(
    llama: tuple[Driver, Driver], sampling: dict[str, Any], max_verified: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with drafts are rows of prompts in the graphs there are; and have some of their own, of few tokens."""
    plain, drafting = llama
    expected = asked(plain, **sampling)
    guess_by(drafting, oracle(texts_of(expected), 0.25))
    buckets = Buckets(6, 64, 4, max_samples=30, max_verified=max_verified)
    graphs = use_eager_graphs(drafting, monkeypatch, buckets)
    monkeypatch.setattr(drafting.engine._loaded.runner.inputs, "context_lens", torch.zeros(64, dtype=torch.int32))
    found = asked(drafting, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    drafted = [plan for plan in found.plans if (plan.num_scheduled > 1).any() and not plan.new_sequences]
    assert drafted
    assert any(bucket.spans and bucket.rows > 6 for bucket in graphs.replayed)
    small = [bucket for bucket in graphs.replayed if bucket.spans and bucket.rows == bucket.tokens < 32]
    assert bool(small) == bool(max_verified)


@pytest.mark.parametrize("sampling", [{}, SEEDED, SAMPLINGS["penalties"]], ids=["greedy", "seeded", "penalties"])
def test_steps_that_do_not_look(
    llama: tuple[Driver, Driver], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step looks for no drafts the device does not follow lengths. It is told them when a step looks again."""
    rest_often(monkeypatch)
    found = check_with_and_without(llama, **sampling)[1]
    rested = [is_rest(plan) for plan in found.plans]
    assert sum(rested) > 1
    behind = found.plans[rested.index(True) :]
    assert any(len(plan.latest_starts) > plan.num_decodes for plan in behind), "drafts come again"
