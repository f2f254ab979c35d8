"""MTP layers with random weights: tokens are those without, and drafts those of the plainest reference.

Heads that are not tied say one of few tokens, so that a random layer is right now and then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.graphs.head_passes import follow_of
from pagebus.actors.executor.models.mtp import Mtp
from pagebus.actors.model.config import ModelError
from pagebus.actors.model.families.experts.glm_moe import FAMILY as GLM
from pagebus.actors.model.families.latent.deepseek import DEEPSEEK3
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import PROMPTS, SAMPLINGS, SEEDED, accepted, asked, tokens_of
from tests.actors.executor.speculation.test_heads import SAMPLED, check_padded_guesses, drafted, heads
from tests.actors.executor.speculation.tiny_mtp import FILE, PlainMtp, add_layer
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import make_golden

pytestmark = pytest.mark.share(6)

MTP: dict[str, Any] = {"spec_method": "mtp", "spec_tokens": 3}
Engines = tuple[Driver, Driver, Path]
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "deepseek": (DEEPSEEK3, "deepseek-v3", {"copies": True}),
    "glm": (GLM, "glm4-moe", {"copies": False}),
    "own head": (GLM, "glm4-moe-groups", {"copies": False, "own": True}),
}


def made(folder: Path, name: str) -> Path:
    family, golden, told = MODELS[name]
    return add_layer(make_golden(folder, family.model_type, family.golden[golden]), **told)


@pytest.fixture(scope="module", params=MODELS)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = made(tmp_path_factory.mktemp("mtp"), request.param)
    both = Driver(folder, **SETTINGS, spec_method="none"), Driver(folder, **SETTINGS, **MTP)
    yield *both, folder
    for driver in both:
        driver.close()


def check(found: list[tuple[list[int], list[int]]], folder: Path) -> None:
    reference = PlainMtp(folder)
    assert found
    for tokens, drafts in found:
        assert reference.drafts(tokens, len(drafts)) == drafts


@pytest.mark.parametrize("sampling", [{}, SEEDED, SAMPLED, SAMPLINGS["penalties"]],
                         ids=["greedy", "seeded", "allowed", "penalties"])  # fmt: skip
def test_tokens_are_those_without(engines: Engines, sampling: dict[str, Any]) -> None:
    plain, drafting, folder = engines
    found = asked(drafting, **sampling)
    assert tokens_of(found) == tokens_of(asked(plain, **sampling))
    if not sampling and "lm_head.weight" in load_file(folder / FILE):
        assert accepted(found) > 0


def test_drafts_are_those_of_the_reference(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind chunks of prompts and rejected drafts, beside other sequences; also one that follows another draft."""
    _, drafting, folder = engines
    found = drafted(drafting, monkeypatch)
    asked(drafting, **SAMPLED)
    longer = [each for each in found if len(each[1]) > 1]
    assert longer
    check(longer[:8] + found[:8], folder)


def test_padded_steps(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """From graphs, which copy the last hidden states on their way."""
    plain, drafting, folder = engines
    expected = asked(plain, **SAMPLED)
    if drafting.engine._loaded.runner.model.config.latent is not None:
        pytest.skip("the double of graphs pads no latents")
    graphs = use_eager_graphs(drafting, monkeypatch, Buckets(6, 64, 4, max_samples=30, max_verified=30))
    watched = drafted(drafting, monkeypatch)
    assert tokens_of(asked(drafting, **SAMPLED)) == tokens_of(expected)
    assert graphs.replayed
    assert {follow_of(bucket) for bucket in graphs.replayed} <= graphs.head_passes
    check(watched[:8], folder)


def test_padded_guesses(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of latents and of experts too."""
    check_padded_guesses(engines[1], monkeypatch)


def test_copies_of_the_models_tensors_are_shared(tmp_path: Path) -> None:
    """What a checkpoint stores twice is in memory once; what is otherwise there is the layer's own."""
    for name, shared in (("deepseek", True), ("own head", False)):
        driver = Driver(made(tmp_path / name, name), **SETTINGS, **MTP)
        model, layer = driver.engine._loaded.runner.model, heads(driver).head
        assert isinstance(layer, Mtp)
        assert (layer._embedding is model.embedding, layer._head is model.head) == (shared, shared)
        driver.close()


def test_a_block_has_room_for_the_layer(engines: Engines) -> None:
    """In the model's own format, as much as one of its layers."""
    plain, drafting, folder = engines
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert drafting.info.block_bytes * layers == plain.info.block_bytes * (layers + 1)
    assert plain.info.num_drafts == 0


def test_few_blocks_and_found_ones(engines: Engines) -> None:
    """Sequences are preempted with drafts in flight, and come back from the host."""
    plain, drafting, _ = engines
    few = asked(drafting, {"num_blocks": 9}, **SAMPLED)
    assert [answer.tokens for answer in few.answers.values()] == tokens_of(asked(plain, **SAMPLED))
    assert few.preempted


def test_as_many_drafts_as_layers(tmp_path: Path) -> None:
    """Where nothing is said."""
    driver = Driver(made(tmp_path, "glm"), **SETTINGS, spec_method="mtp")
    assert driver.info.num_drafts == 1
    driver.close()


def test_dummy_weights(tmp_path: Path) -> None:
    """What is measured without a checkpoint."""
    driver = Driver(made(tmp_path, "deepseek"), **SETTINGS, **MTP, load_format="dummy")
    assert len(tokens_of(asked(driver))) == len(PROMPTS)
    driver.close()


def test_layers_that_cannot_be(tmp_path: Path) -> None:
    """One error before the engine is ready."""
    none = make_golden(tmp_path / "none", GLM.model_type, GLM.golden["glm4-moe"])
    raw = json.loads((none / "config.json").read_text())
    (none / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match="the model has no such layers"):
        Driver(none, **SETTINGS, **MTP)
    broken = made(tmp_path / "broken", "glm")
    tensors = load_file(broken / FILE)
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, broken / FILE)
    with pytest.raises(ModelError, match=r"the weights lack tensor model\.layers\.3\.eh_proj\.weight"):
        Driver(broken, **SETTINGS, **MTP)
