"""EAGLE-3 heads on CUDA: tokens are those without, and in float32 drafts are those of the reference, from graphs too.

Runs on a bare GPU host as ``tests/gpu/speculation/test_speculation.py`` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagebus.actors.executor.graphs.head_passes import Follow, Guess, HeadPass
from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import PROMPTS, SAMPLINGS, accepted, asked, tokens_of
from tests.actors.executor.speculation.test_heads import SAMPLED, Engines, check_drafts, drafted, engines
from tests.actors.scheduler.rests import rest_often
from tests.helpers.engine_driver import Driver

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
    settings = {**SETTINGS, "device": "cuda", "num_gpu_blocks_override": 100, "swap_space": 0, **told}
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


def test_steps_that_want_no_drafts(
    heads: tuple[Engines, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The head follows them, from graphs too, before their tokens are read back."""
    (plain, drafting, _, _), _ = heads
    rest_often(monkeypatch)
    for sampling in ({}, SAMPLED):
        assert tokens_of(asked(drafting, **sampling)) == tokens_of(asked(plain, **sampling))


def test_drafts_are_those_of_the_reference(
    heads: tuple[Engines, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, drafting, head, folder), told = heads
    if told["dtype"] != "float32":
        pytest.skip("the reference is in float32")
    found = drafted(drafting, monkeypatch)
    asked(drafting, **SAMPLED)
    check_drafts(found[:24], folder.parent / "model", head, folder, drafting.info.window)


def test_passes_from_graphs(heads: tuple[Engines, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    (_, drafting, _, _), told = heads
    if told["dtype"] != "float32" or drafting.engine._graphs is None:
        pytest.skip("in bfloat16 rounding decides about guesses; without graphs there is nothing to compare")
    check_passes_from_graphs(drafting, monkeypatch)


def check_passes_from_graphs(drafting: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the head that graphs hold draft the same, and store the same, as those launched kernel by kernel."""
    watched, graphs = drafted(drafting, monkeypatch), drafting.engine._graphs
    assert graphs is not None
    launched: list[tuple[HeadPass, bool]] = []
    run_head = graphs.run_head

    def noted(wanted: HeadPass) -> bool:
        launched.append((wanted, run_head(wanted)))
        return launched[-1][1]

    monkeypatch.setattr(graphs, "run_head", noted)
    tokens = tokens_of(asked(drafting, **SAMPLED))
    drafting.synchronize()  # what was missed is there now
    launched.clear()
    watched.clear()
    assert tokens_of(asked(drafting, **SAMPLED)) == tokens
    assert {type(wanted) for wanted, _ in launched} == {Guess, Follow}
    assert all(from_graph for _, from_graph in launched)
    by_graphs = {tuple(before): drafts for before, drafts in watched}

    monkeypatch.setattr(graphs, "run_head", lambda wanted: False)
    watched.clear()
    assert tokens_of(asked(drafting, **SAMPLED)) == tokens
    both = [(by_graphs[tuple(before)], drafts) for before, drafts in watched if tuple(before) in by_graphs]
    assert len(both) > len(PROMPTS)
    for one, other in both:
        count = min(len(one), len(other))
        assert one[:count] == other[:count]


def test_few_blocks(heads: tuple[Engines, dict[str, Any]]) -> None:
    (plain, drafting, _, _), _ = heads
    expected = asked(plain, **SAMPLED)
    few = asked(drafting, {"num_blocks": 9}, **SAMPLED)
    assert [answer.tokens for answer in few.answers.values()] == tokens_of(expected)
    assert few.preempted
