"""Draft models on CUDA: tokens are those without, and in float32 drafts are those of transformers.

Runs on a bare GPU host as ``tests/gpu/speculation/test_speculation.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import SAMPLINGS, SEEDED, asked, tokens_of
from tests.actors.executor.speculation.test_draft_model import Pair, pairs, share
from tests.actors.executor.speculation.test_heads import drafted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "itself, float32": ("itself", {"dtype": "float32"}),
    "another, float32": ("another", {"dtype": "float32"}),
    "another, float32, no graphs": ("another", {"dtype": "float32", "enforce_eager": True}),
    "windows, float32": ("windows", {"dtype": "float32"}),
    "itself, bfloat16": ("itself", {"dtype": "bfloat16", "deterministic": True}),
    "another, bfloat16, float8 cache": (
        "another", {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "deterministic": True}
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Pair, str, dict[str, Any]]]:
    name, given = request.param
    settings = {**SETTINGS, "device": "cuda", "num_gpu_blocks_override": 100, "swap_space": 0, **given}
    for pair in pairs(tmp_path_factory.mktemp("pair"), name, settings):
        for driver in (pair.plain, pair.drafting):
            driver.synchronize()
        yield pair, name, given


@pytest.mark.parametrize("sampling", [{}, SEEDED, SAMPLINGS["penalties"]], ids=["greedy", "seeded", "penalties"])
def test_tokens_are_those_without(
    engines: tuple[Pair, str, dict[str, Any]], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, name, given = engines
    expected, watched = asked(pair.plain, **sampling), drafted(pair.drafting, monkeypatch)
    found = asked(pair.drafting, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    if name == "itself" and not sampling:
        assert share(found) > 0.9
    if given["dtype"] == "float32":
        pair.check(watched[:8] + watched[-8:])


def test_few_blocks(engines: tuple[Pair, str, dict[str, Any]]) -> None:
    pair, name, _ = engines
    expected = asked(pair.plain)
    few = asked(pair.drafting, {"num_blocks": 9})
    assert [answer.tokens for answer in few.answers.values()] == tokens_of(expected)
    assert few.preempted
    assert name != "itself" or share(few) > 0.9
