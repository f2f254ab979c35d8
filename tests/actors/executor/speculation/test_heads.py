"""EAGLE-3 heads with random weights: the tokens are those without, and the drafts those of the plainest reference.

A head of random weights is never right in a vocabulary of hundreds. So requests allow two tokens, and the head knows
just these: then runs of all lengths are accepted by chance.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.batch.step_work import StepWork
from pagebus.actors.executor.graphs.graphs import Graphs
from pagebus.actors.executor.graphs.head_passes import Guess, follow_of
from pagebus.actors.executor.step.head_drafts import HeadDrafts
from pagebus.actors.model.config import ModelError
from tests.actors.executor.eager_graphs import EagerGraphs, use_eager_graphs
from tests.actors.executor.small_engine import SETTINGS
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
    texts_of,
    tokens_of,
)
from tests.actors.executor.speculation.tiny_head import TinyHead, plain_drafts, weights_of
from tests.actors.scheduler.rests import rest_often
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, load_reference, make_golden, make_reference

pytestmark = pytest.mark.share(6)

ALLOWED = (17, 140)
SAMPLED: dict[str, Any] = {"allowed_token_ids": ALLOWED, "temperature": 2.0, "seed": 5}
GEMMA: dict[str, Any] = {
    "head_dim": 64, "hidden_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 64,
}  # fmt: skip
Engines = tuple[Driver, Driver, TinyHead, Path]


def engines(folder: Path, family: str, settings: dict[str, Any] = SETTINGS, **flags: Any) -> Iterator[Engines]:
    """An engine without a head, one with, what the head is and where; the model is in ``folder / "model"``."""
    config = {"llama": LLAMA, "mistral": MISTRAL, "qwen3": QWEN}.get(family)
    path = make_reference(folder / "model", config) if config else make_golden(folder / "model", "gemma3_text", GEMMA)
    hidden = config.overrides.get("hidden_size", DEFAULTS["hidden_size"]) if config else GEMMA["hidden_size"]
    made = {"own_embedding": flags.pop("own_embedding", True), "speculators": flags.pop("speculators", True)}
    head = TinyHead(hidden, 307, (1, 0, 1), known=ALLOWED, flags=flags, **made)
    its = head.save(folder / "head")
    told = {"spec_method": "eagle3", "spec_model": str(its), "spec_tokens": 4}
    both = Driver(path, **settings, spec_method="none"), Driver(path, **settings, **told)
    yield *both, head, its
    for driver in both:
        driver.close()


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral", "gemma3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from engines(tmp_path_factory.mktemp("family"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from engines(tmp_path_factory.mktemp("llama"), "llama")


def drafted(driver: Driver, patch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """From now on, each row's tokens before it drafts, and its drafts."""
    found: list[tuple[list[int], list[int]]] = []
    drafts = heads(driver)
    draft = drafts.draft

    def watched(work: StepWork, graphs: Graphs | None) -> None:
        draft(work, graphs)
        for row, slot in enumerate(work.slots.tolist()):
            count, length = int(work.query_start[row + 1] - work.query_start[row]) - 1, int(drafts._lengths[slot])
            if row >= work.num_decodes and length - 1 <= work.starts[row] and count:
                line = drafts._state.tokens[slot, : length + count].tolist()
                found.append((line[:length], line[length:]))

    patch.setattr(drafts, "draft", watched)
    return found


def heads(driver: Driver) -> HeadDrafts:
    drafting = driver.engine._loaded.runner.drafting
    assert drafting is not None
    assert drafting.head is not None
    return drafting.head


def check_drafts(
    found: list[tuple[list[int], list[int]]], model: Path, head: TinyHead, folder: Path, window: int = 0
) -> None:
    """They are those of the reference; with a ``window``, as the model's cache keeps no more."""
    reference, weights = load_reference(model), weights_of(folder)
    if not head.own_embedding:
        weights["embed_tokens.weight"] = reference.get_input_embeddings().weight.detach()
    assert found
    for tokens, drafts in found:
        with torch.inference_mode():
            out = reference(torch.tensor([tokens[:-1]]), output_hidden_states=True)
        hidden = torch.cat([out.hidden_states[layer][0] for layer in head.taps], dim=1)
        with torch.inference_mode():
            assert plain_drafts(head, weights, hidden, tokens, len(drafts), window) == drafts


@pytest.mark.parametrize("sampling", [{}, SEEDED, SAMPLED], ids=["greedy", "seeded", "allowed"])
def test_tokens_are_those_without(family: Engines, sampling: dict[str, Any]) -> None:
    """Full attention, normalised heads, windows everywhere and in some layers; prompts in several chunks."""
    plain, drafting, _, _ = family
    expected, found = asked(plain, **sampling), asked(drafting, **sampling)
    assert tokens_of(found) == tokens_of(expected)
    if sampling is SAMPLED:
        assert accepted(found) > len(PROMPTS)


@pytest.mark.parametrize("rests", [False, True])
def test_drafts_are_those_of_the_reference(family: Engines, rests: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind chunks of prompts, accepted runs, rejected drafts, and steps that want none, beside other sequences."""
    _, drafting, head, folder = family
    if rests:
        rest_often(monkeypatch)
    found = drafted(drafting, monkeypatch)
    asked(drafting, **SAMPLED)
    longer = [each for each in found if len(each[1]) > 1]
    assert longer
    check_drafts(longer[:12] + found[:12], folder.parent / "model", head, folder, drafting.info.window)


@pytest.mark.parametrize(
    "flags",
    [
        {"speculators": False},
        {"own_embedding": False, "norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True, "speculators": False},
        {"fc_norm": True, "norm_before_residual": True, "norm_output": True},
    ],
    ids=lambda flags: ", ".join(flags),
)
def test_kinds_of_heads(tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both formats, and all that they may say, against the reference."""
    for plain, drafting, head, folder in engines(tmp_path, "llama", **flags):
        found = drafted(drafting, monkeypatch)
        assert tokens_of(asked(drafting, **SAMPLED)) == tokens_of(asked(plain, **SAMPLED))
        check_drafts(found[:10], tmp_path / "model", head, folder)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_every_kind_of_sampling(llama: Engines, sampling: dict[str, Any]) -> None:
    """Sampled anew, behind what plain sampling has stored."""
    plain, drafting, _, _ = llama
    assert tokens_of(asked(drafting, **sampling)) == tokens_of(asked(plain, **sampling))


def test_few_blocks(llama: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are preempted with drafts in flight and come back from the host, with keys and values of the head."""
    plain, drafting, head, folder = llama
    expected, found = asked(plain, **SAMPLED), drafted(drafting, monkeypatch)
    few = asked(drafting, {"num_blocks": 9}, **SAMPLED)
    assert [answer.tokens for answer in few.answers.values()] == tokens_of(expected)
    assert few.preempted
    assert any(len(plan.swap_in_blocks) for plan in few.plans)
    check_drafts(found[-20:], folder.parent / "model", head, folder)


def test_found_in_the_cache(llama: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that goes on with an answer finds its blocks, and the head's keys in them."""
    plain, drafting, head, folder = llama
    expected, found = asked(plain, **SAMPLED), asked(drafting, **SAMPLED)
    watched = drafted(drafting, monkeypatch)
    for core in (expected, found):
        for number, text in enumerate(texts_of(core)):
            core.send(f"again {number}", text, 9, SAMPLED)
        core.run()
    assert tokens_of(found) == tokens_of(expected)
    assert sum(answer.cached for name, answer in found.answers.items() if name.startswith("again")) >= 16 * len(PROMPTS)
    check_drafts(watched[:12], folder.parent / "model", head, folder)


def test_padded_steps(llama: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """From graphs, which read the model's hidden states on their way; and so do the head's passes."""
    plain, drafting, head, folder = llama
    expected = asked(plain, **SAMPLED)
    graphs = use_eager_graphs(drafting, monkeypatch, Buckets(6, 64, 4, max_samples=30, max_verified=30))
    watched = drafted(drafting, monkeypatch)
    assert tokens_of(asked(drafting, **SAMPLED)) == tokens_of(expected)
    assert graphs.replayed
    assert {follow_of(bucket) for bucket in graphs.replayed} <= graphs.head_passes
    check_drafts(watched[:12], folder.parent / "model", head, folder)


def test_padded_guesses(llama: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever they are padded to, all drafts are those of passes that are not."""
    check_padded_guesses(llama[1], monkeypatch)


def check_padded_guesses(drafting: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind steps that run without graphs."""
    watched = drafted(drafting, monkeypatch)
    asked(drafting, **SAMPLED)
    expected, runner = watched[:], drafting.engine._loaded.runner
    graphs = EagerGraphs(Buckets(6, 64, 4), runner)
    monkeypatch.setattr(graphs, "bucket", lambda work, adapted: None)
    monkeypatch.setattr(runner, "graphs", graphs)
    watched.clear()
    asked(drafting, **SAMPLED)
    assert watched == expected
    assert graphs.head_passes >= {Guess(4), Guess(6)}  # of three and five sequences too


def test_a_head_within_the_folder_of_its_model(llama: Engines, tmp_path: Path) -> None:
    """It needs no name; and where there is none, the error says what to give."""
    _, _, head, folder = llama
    model = tmp_path / "model"
    shutil.copytree(folder.parent / "model", model)
    settings = {**SETTINGS, "spec_method": "eagle3", "spec_tokens": 4}
    with pytest.raises(ModelError, match="model \\(--spec-model\\) is missing, and there is no folder"):
        Driver(model, **settings)
    head.save(model / "eagle3")
    driver = Driver(model, **settings)
    assert heads(driver).head.config.taps == head.taps
    driver.close()


def test_an_executor_dies(llama: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another goes on from the tokens alone: what comes is the same, and the head reads them anew."""
    plain, drafting, head, folder = llama
    expected, core = tokens_of(asked(plain, **SAMPLED)), CoreDriver(drafting)
    for number, prompt in enumerate(PROMPTS):
        core.send(str(number), prompt, NUM_TOKENS, SAMPLED)
    core.run(until=lambda: sum(len(answer.tokens) for answer in core.answers.values()) > 40)
    told = {"spec_method": "eagle3", "spec_model": str(folder), "spec_tokens": 4}
    successor = Driver(folder.parent / "model", **SETTINGS, **told)
    watched = drafted(successor, monkeypatch)
    core.lose(successor)
    core.run()
    assert [answer.tokens for answer in core.answers.values()] == expected
    check_drafts(watched[:12], folder.parent / "model", head, folder)
    successor.close()


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"draft_vocab_size": 7}, "tensor d2t is [2] of I64, not [7]"),
    ({"d2t": torch.full((2,), 500)}, "tensor d2t names tokens beyond the model's vocabulary of 307"),
    ({"d2t": None}, "it knows 2 of 307 tokens, and has no d2t"),
    ({"t2d": torch.zeros(5, dtype=torch.bool)}, "tensor t2d has shape [5], the model's vocabulary is [307]"),
    ({"fc.weight": None}, "the weights lack tensor fc.weight"),
    ({"fc.weight": torch.zeros(64, 5)}, "tensor fc.weight in model.safetensors has shape [64, 5]"),
    ({"norm.weight": torch.zeros(64, dtype=torch.int8)}, "tensor norm.weight in model.safetensors has format I8"),
    ({"more.weight": torch.zeros(5)}, "the weights hold tensor more.weight"),
    ({"embed_tokens.weight": None}, "it has no embed_tokens.weight, and that of the model has 96 columns, not 64"),
    ({"target_hidden_size": 128}, "it is for hidden states of 128 numbers, the model has 96"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 5]}, "before layers 0, 5, the model has 2 layers"),
    ({"eagle_aux_hidden_state_layer_ids": None}, "before layers 2, 1, -1, the model has 2 layers"),
    ({"eagle_aux_hidden_state_layer_ids": ["x"]}, "is ['x'], not a list of whole numbers"),
    ({"speculators_model_type": "eagle"}, "speculators_model_type 'eagle' is not supported"),
    ({"transformer_layer_config": {"vocab_size": 5}}, "config.json has no"),
]


@pytest.mark.parametrize(("changes", "why"), BROKEN, ids=[why for _, why in BROKEN])
def test_heads_that_cannot_be(llama: Engines, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    """One error, which names the head, before the engine is ready."""
    _, _, head, folder = llama
    broken = head.save(tmp_path / "head", **changes)
    with pytest.raises(ModelError) as error:
        Driver(folder.parent / "model", **SETTINGS, spec_method="eagle3", spec_model=str(broken), spec_tokens=4)
    assert f"speculative model {broken}: " in str(error.value)
    assert why in str(error.value)
