"""Every family with drafts: its tokens are those without. ``make families`` runs all, else one of each kind runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actors.executor.speculation.checks import (
    SEEDED,
    asked,
    check_with_and_without,
    drivers_of,
    guess_by,
    tokens_of,
)
from tests.actors.executor.speculation.drafters import ADVERSARIES
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden
from tests.system.answers.test_family_tokens import FULL, MODEL_TYPES, limits_of

pytestmark = pytest.mark.share(6)

KINDS = (
    "gemma3-odd",  # windows in some layers
    "llama4",  # chunks, experts of weighted inputs
    "gpt-oss",  # sinks, experts with biases
    "deepseek-v3",  # latent attention
)


@pytest.fixture(scope="module", params=MODEL_TYPES if FULL else KINDS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    model_type, fields = MODEL_TYPES[request.param]
    folder: Path = make_golden(tmp_path_factory.mktemp(request.param), model_type, fields)
    yield from drivers_of(folder, **limits_of(request.param))


def test_drafts_change_no_token(both: tuple[Driver, Driver]) -> None:
    """Right ones, wrong ones and those that the engine finds; greedy, and at random with a seed."""
    plain, drafting = both
    check_with_and_without(both, **SEEDED)
    check_with_and_without(both)
    expected = tokens_of(asked(plain))
    for guess in ADVERSARIES.values():
        guess_by(drafting, guess)
        assert tokens_of(asked(drafting)) == expected
