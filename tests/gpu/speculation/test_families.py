"""Every family with drafts on CUDA, in bfloat16 with ``--deterministic``: its tokens are those without, to the bit.

One model of each family, or all with ``PAGEBUS_TEST_FAMILIES=full``. Runs on a bare GPU host as
``tests/gpu/speculation/test_speculation.py`` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.model.families.registry import FAMILIES
from pagebus.actors.model.family import Family
from tests.actors.executor.speculation.checks import (
    PROMPTS,
    SEEDED,
    accepted,
    asked,
    drivers_of,
    guess_by,
    scores_of,
    texts_of,
    tokens_of,
)
from tests.actors.executor.speculation.drafters import ADVERSARIES, oracle
from tests.gpu.engine.test_families import golden
from tests.helpers.engine_driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
FULL = os.environ.get("PAGEBUS_TEST_FAMILIES") == "full"
MODELS = [(family, name) for family in FAMILIES for name in list(family.golden)[: None if FULL else 1]]
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "deterministic": True, "enforce_eager": True, "swap_space": 0,
    "num_gpu_blocks_override": 100,
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS, ids=[name for _, name in MODELS])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Driver, Driver]]:
    family: Family = request.param[0]
    folder: Path = golden(tmp_path_factory.mktemp("model"), family, request.param[1])
    yield from drivers_of(folder, **SETTINGS)


def test_drafts_change_no_bit(both: tuple[Driver, Driver]) -> None:
    """Greedily, and at random with a seed: the same tokens, with the same log probabilities."""
    for sampling in ({}, SEEDED):
        check(both, sampling)


def check(both: tuple[Driver, Driver], sampling: dict[str, Any]) -> None:
    """With drafts of which one in four is wrong, with those that are looked up, and with some that never are right."""
    plain, drafting = both
    expected = asked(plain, logprobs=2, **sampling)
    for guess in (oracle(texts_of(expected), 0.25), None, *ADVERSARIES.values()):
        guess_by(drafting, guess)
        found = asked(drafting, logprobs=2, **sampling)
        assert tokens_of(found) == tokens_of(expected)
        assert scores_of(found.results) == scores_of(expected.results)
        if guess is not None and guess not in ADVERSARIES.values():
            assert accepted(found) > len(PROMPTS)
