"""EAGLE-3 heads on CUDA: tokens are those without, and in float32 drafts are those of the reference.

Runs on a bare GPU host as ``tests/gpu/speculation/test_speculation.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import PROMPTS, SAMPLINGS, accepted, asked, tokens_of
from tests.actors.executor.speculation.test_heads import SAMPLED, Engines, check_drafts, drafted, engines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {"dtype": "float32"}),
    "float32, windows": ("mistral", {"dtype": "float32"}),
    "float32, no graphs": ("qwen3", {"dtype": "float32", "enforce_eager": True}),
    "bfloat16": ("llama", {"dtype": "bfloat16", "deterministic": True}),
    "bfloat16, float8 cache": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "deterministic": True}),
}


@pytest.fixture(scope="module", params=ENGINES.values(), ids=ENGINES)
def heads(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engines, dict[str, Any]]]:
    family, told = request.param
    settings = {**SETTINGS, "device": "cuda", "num_gpu_blocks_override": 100, **told}
    for found in engines(tmp_path_factory.mktemp("head"), family, settings):
        for driver in found[:2]:
            driver.synchronize()
        yield found, told


@pytest.mark.parametrize("sampling", [{}, SAMPLED, SAMPLINGS["penalties"]], ids=["greedy", "allowed", "penalties"])
def test_tokens_are_those_without(heads: tuple[Engines, dict[str, Any]], sampling: dict[str, Any]) -> None:
    (plain, drafting, _, _), _ = heads
    expected, found = asked(plain, **sampling), asked(drafting, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    if sampling is SAMPLED:
        assert accepted(found) > len(PROMPTS)


def test_drafts_are_those_of_the_reference(
    heads: tuple[Engines, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, drafting, head, folder), told = heads
    if told["dtype"] != "float32":
        pytest.skip("the reference is in float32")
    found = drafted(drafting, monkeypatch)
    asked(drafting, **SAMPLED)
    check_drafts(found[:24], folder.parent / "model", head, folder, drafting.info.window)


def test_few_blocks(heads: tuple[Engines, dict[str, Any]]) -> None:
    (plain, drafting, _, _), _ = heads
    expected = asked(plain, **SAMPLED)
    few = asked(drafting, {"num_blocks": 9}, **SAMPLED)
    assert [answer.tokens for answer in few.answers.values()] == tokens_of(expected)
    assert few.preempted
