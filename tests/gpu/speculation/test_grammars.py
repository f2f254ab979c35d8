"""Drafts of sequences that follow a grammar on CUDA: masks of runs come in time, and from graphs too.

Runs on a bare GPU host too: ``PYTHONPATH=. pytest -c /dev/null --rootdir . --noconftest --import-mode=importlib
tests/gpu/speculation/test_grammars.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.actors.executor.speculation.checks import accepted, guess_by, tokens_of
from tests.actors.executor.speculation.constrained import (
    ADVERSARIES,
    WANTED,
    asked,
    check,
    drivers,
    drivers_with_draft_model,
    guess_by_head,
    texts_of,
)
from tests.actors.executor.speculation.drafters import oracle
from tests.helpers.engine_driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, no graphs": {"dtype": "float32", "enforce_eager": True},
    "bfloat16": {"dtype": "bfloat16", "deterministic": True},
}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Driver, Driver]]:  # fmt: skip
    for drivers_of_both in drivers(tmp_path_factory.mktemp("model"), device="cuda", **request.param):
        for driver in drivers_of_both:
            driver.synchronize()
        yield drivers_of_both


def test_tokens_are_those_without_drafts(both: tuple[Driver, Driver]) -> None:
    """With one draft in four wrong, twice: the second time graphs of the sampling have been captured."""
    for _ in range(2):
        assert accepted(check(both)) > 60


def test_preempted_sequences_go_on(both: tuple[Driver, Driver]) -> None:
    """From their accepted tokens."""
    assert check(both, num_blocks=7).preempted


def test_drafters_that_are_hardly_ever_right(both: tuple[Driver, Driver]) -> None:
    """Impossible drafts, ends, and repetitions change nothing."""
    expected = tokens_of(asked(both[0]))
    for guess in ADVERSARIES.values():
        guess_by(both[1], guess)
        assert tokens_of(asked(both[1])) == expected


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_what_a_head_guesses(settings: dict[str, Any], tmp_path: Path) -> None:
    """A model drafts for itself; then an oracle in its place, which is wrong now and then. Twice, as above."""
    for plain, drafting in drivers_with_draft_model(tmp_path, device="cuda", **settings):
        for driver in (plain, drafting):
            driver.synchronize()
        expected = asked(plain)
        assert tokens_of(asked(drafting)) == tokens_of(expected)
        guess_by_head(drafting, oracle(texts_of(expected), 0.25))
        for _ in range(2):
            found = asked(drafting)
            assert tokens_of(found) == tokens_of(expected)
            assert accepted(found) > 60


def test_several_choices(both: tuple[Driver, Driver]) -> None:
    """Each draws, drafts and is masked for itself."""
    wanted = [{**WANTED[2], "n": 3}, {**WANTED[0], "n": 2}]
    expected = asked(both[0], wanted)
    guess_by(both[1], oracle(texts_of(expected), 0.25))
    assert tokens_of(asked(both[1], wanted)) == tokens_of(expected)
