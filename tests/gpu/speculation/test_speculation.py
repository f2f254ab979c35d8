"""Speculation on CUDA: whatever is drafted, the tokens are those without.

In float32, where rounding decides nothing in these small models; and in bfloat16 with ``--deterministic``, where not a
bit of a log probability may differ. Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir .
--noconftest --import-mode=importlib tests/gpu/speculation/test_speculation.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
from tests.helpers.engine_driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
SETTINGS: dict[str, Any] = {"device": "cuda", "num_gpu_blocks_override": 100, "swap_space": 0}
ENGINES = {
    "float32": (LLAMA, {"dtype": "float32"}),
    "float32, windows": (MISTRAL, {"dtype": "float32"}),
    "float32, no graphs": (QWEN, {"dtype": "float32", "enforce_eager": True}),
    "bfloat16": (LLAMA, {"dtype": "bfloat16", "deterministic": True}),
    "bfloat16, norms of heads": (QWEN, {"dtype": "bfloat16", "deterministic": True}),
}
EVERY_SAMPLING = {"greedy": {}, "seeded": SEEDED, **SAMPLINGS}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driver, Driver]]:  # fmt: skip
    config, settings = request.param
    for both in drivers(config, tmp_path_factory.mktemp("model"), **SETTINGS, **settings):
        for driver in both:
            driver.synchronize()
        yield both


@pytest.mark.parametrize("sampling", EVERY_SAMPLING.values(), ids=EVERY_SAMPLING)
def test_every_kind_of_sampling(engines: tuple[Driver, Driver], sampling: dict[str, Any]) -> None:
    """With the lookup, and with drafts of which one in four is wrong."""
    check_with_and_without(engines, **sampling)


def test_log_probabilities(engines: tuple[Driver, Driver]) -> None:
    """Those of accepted tokens, and of no others."""
    expected, found = check_with_and_without(engines, logprobs=3, **SEEDED)
    (bits, tops), (wanted, wanted_tops) = scores_of(found.results), scores_of(expected.results)
    assert len(bits) == len(PROMPTS) * NUM_TOKENS
    tolerance = 0.0 if engines[0].settings.deterministic else 1e-4
    assert bits == pytest.approx(wanted, abs=tolerance, rel=0)
    assert tops == wanted_tops


@pytest.mark.parametrize("guess", ADVERSARIES.values(), ids=ADVERSARIES)
def test_a_drafter_that_is_never_right(engines: tuple[Driver, Driver], guess: Guess) -> None:
    """It costs time, and changes nothing."""
    plain, drafting = engines
    guess_by(drafting, guess)
    assert tokens_of(asked(drafting, **SEEDED)) == tokens_of(asked(plain, **SEEDED))


def test_predictions(engines: tuple[Driver, Driver]) -> None:
    """What a client predicts is drafted from the first token on; where it is wrong nothing changes."""
    plain, drafting = engines
    expected = asked(plain, **SEEDED)
    wrong = [[*answer[:7], 5, *answer[8:]] for answer in tokens_of(expected)]
    guess_by(drafting, None)
    for predictions in (tokens_of(expected), wrong):
        found = asked(drafting, predictions=predictions, **SEEDED)
        assert tokens_of(found) == tokens_of(expected)
        assert accepted(found) > 2 * len(PROMPTS)


def test_few_blocks(engines: tuple[Driver, Driver]) -> None:
    """Sequences are preempted with drafts in flight, and come back from the host."""
    plain, drafting = engines
    expected = asked(plain)
    guess_by(drafting, oracle(texts_of(expected), 0.25))
    found = asked(drafting, {"num_blocks": 9})
    assert [answer.tokens for answer in found.answers.values()] == tokens_of(expected)
    assert found.preempted
    assert accepted(found)
