"""Ranks with heads, MTP layers and small models that draft: each has a part of these too, and all have the drafts of
one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.graphs.head_passes import Follow, Guess
from pagebus.actors.executor.layers.moe import MixtureOfExperts
from pagebus.actors.executor.models.eagle3_config import load_eagle3
from pagebus.actors.executor.models.mtp import Mtp
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.model.shards.local import local_config
from tests.actors.executor.eager_graphs import pad_steps
from tests.actors.executor.ranks.test_padding import SomeGraphs
from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import (
    LLAMA,
    PROMPTS,
    SAMPLINGS,
    SEEDED,
    accepted,
    asked,
    tokens_of,
)
from tests.actors.executor.speculation.constrained import LETTERS, PROMPT, SHIPPED, following
from tests.actors.executor.speculation.test_draft_model import HALVED, SMALLER, told
from tests.actors.executor.speculation.test_heads import drafted, heads
from tests.actors.executor.speculation.test_mtp import MTP, made
from tests.actors.executor.speculation.tiny_head import TinyHead
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, make_reference
from tests.helpers.ranks.rank_driver import RankDriver
from tests.helpers.ranks.thread_comm import thread_comms

pytestmark = pytest.mark.share(8)

KNOWN = (1, 2, 4, 5, 7)
"""To heads; MTP layers say one of few tokens, too."""
SAMPLED: dict[str, Any] = {"allowed_token_ids": KNOWN, "temperature": 2.0, "seed": 5}
ASKED: list[dict[str, Any]] = [{}, SAMPLED, SAMPLINGS["penalties"]]


def head(folder: Path, hidden: int, **fields: Any) -> dict[str, Any]:
    """Settings with a new head that knows few tokens, for a model of ``hidden`` numbers."""
    path = TinyHead(hidden, 307, (1, 0, 1), known=KNOWN, **fields).save(folder / "head")
    return {"spec_method": "eagle3", "spec_model": str(path), "spec_tokens": 4}


def llama_with_head(folder: Path, **fields: Any) -> tuple[Path, dict[str, Any]]:
    return make_reference(folder / "model", LLAMA), head(folder, LLAMA.overrides["hidden_size"], **fields)


def odd(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Three heads of keys in both, five tokens of the head, 307 of the model."""
    model = make_reference(folder / "model", HALVED)
    hidden = HALVED.overrides.get("hidden_size", DEFAULTS["hidden_size"])
    return model, head(folder, hidden, kv_heads=3, own_embedding=False)


KINDS: dict[str, Any] = {
    "head": llama_with_head,
    "head with the model's embedding": lambda folder: llama_with_head(
        folder, own_embedding=False, flags={"norm_before_residual": True, "norm_output": True}
    ),
    "odd heads": odd,
    "mtp of latents": lambda folder: (made(folder / "model", "deepseek"), MTP),
    "mtp": lambda folder: (made(folder / "model", "glm"), MTP),
    "mtp with its own embedding": lambda folder: (made(folder / "model", "own head"), MTP),
    "itself": lambda folder: (model := make_reference(folder / "model", LLAMA), told(model)),
    "small model": lambda folder: (
        make_reference(folder / "model", LLAMA), told(make_reference(folder / "draft", SMALLER))
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Engines:
    """One rank without drafts, one with, and several with."""

    kind: str
    plain: Driver
    one: Driver
    ranks: RankDriver


def engines(folder: Path, kind: str, world: int, **settings: Any) -> Iterator[Engines]:
    path, drafts = KINDS[kind](folder)
    given = SETTINGS | settings
    made = Engines(
        kind, Driver(path, **given, spec_method="none"), Driver(path, **given, **drafts),
        RankDriver(path, world, **given, **drafts),
    )  # fmt: skip
    yield made
    for driver in (made.plain, made.one, made.ranks):
        driver.close()


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind not in ("mtp", "itself")])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from engines(tmp_path_factory.mktemp("two"), request.param, 2)


def watched(ranks: RankDriver, patch: pytest.MonkeyPatch) -> list[list[tuple[list[int], list[int]]]]:
    """From now on, what each of them drafts, as of :func:`drafted`."""
    return [drafted(cast("Driver", SimpleNamespace(engine=engine)), patch) for engine in ranks.engines]


def check(engines: Engines, sampling: dict[str, Any], patch: pytest.MonkeyPatch) -> int:
    """Tokens are those without drafts, drafts and how many are right those of one rank; says how many."""
    expected = tokens_of(asked(engines.plain, **sampling))
    with patch.context() as watching:
        own, others = drafted(engines.one, watching), watched(engines.ranks, watching)
        one, ranks = asked(engines.one, **sampling), asked(engines.ranks, **sampling)
    assert tokens_of(one) == tokens_of(ranks) == expected
    assert own
    assert all(each == own for each in others)
    assert accepted(ranks) == accepted(one)
    return accepted(ranks)


def test_two_ranks(two: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks, rejected drafts, sequences beside each other; some drafts are right. How tokens are drawn does
    not depend on what drafts."""
    samplings = ASKED if two.kind == "head" else ASKED[:2]
    assert sum(check(two, sampling, monkeypatch) for sampling in samplings) > 0


@pytest.mark.parametrize("kind", ["head with the model's embedding", "mtp of latents", "itself"])
def test_four_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are heads of keys."""
    for each in engines(tmp_path, kind, 4):
        assert check(each, SAMPLED, monkeypatch) > 0


def test_whole_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MTP layer's mixture is divided as those of the model are."""
    for each in engines(tmp_path, "mtp", 2, enable_expert_parallel=True):
        layer = heads(cast("Driver", SimpleNamespace(engine=each.ranks.engines[1]))).head
        assert isinstance(layer, Mtp)
        mixture = layer._layer.mlp
        assert isinstance(mixture, MixtureOfExperts)
        assert {weight.shape[0] for weight in mixture.expert_weights.values()} == {4}
        assert check(each, {}, monkeypatch) > 0


def test_a_rank_has_its_part(two: Engines) -> None:
    """Of what drafts too: its tensors, and blocks, which have room for its heads. Latents are whole."""
    latent = two.one.engine._loaded.runner.model.config.latent is not None
    sizes = two.ranks.info.block_bytes, two.one.info.block_bytes
    assert sizes[0] == sizes[1] if latent else sizes[0] < sizes[1]
    whole, *parts = (tensors_of(engine) for engine in (two.one.engine, *two.ranks.engines))
    shapes = {name: [part[name] for part in parts] for name in whole}
    divided = {name for name, each in shapes.items() if sum(each) == whole[name] and min(each) > 0}
    assert all(each == [whole[name]] * 2 for name, each in shapes.items() if name not in divided)
    assert len(divided) >= 6


def tensors_of(engine: Any) -> dict[str, int]:
    """How many numbers each tensor of what drafts has on a rank."""
    made = heads(cast("Driver", SimpleNamespace(engine=engine))).head
    parameters = cast("Any", made.model if hasattr(made, "model") else made).parameters
    return {name: view.numel() for name, view in parameters.views.items()}


def test_graphs_of_ranks_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks exchange does not depend on which passes each has captured, of steps or of what drafts."""
    path, drafts = KINDS["head with the model's embedding"](tmp_path)
    comms = thread_comms(2)
    one, two = Driver(path, **SETTINGS, spec_method="none"), RankDriver(path, 2, list(comms), **SETTINGS, **drafts)
    graphs = []
    for rank, engine in enumerate(two.engines):
        runner, buckets = engine._loaded.runner, Buckets(6, 64, 4, max_samples=30, max_verified=30)
        graphs.append(SomeGraphs(buckets, runner, rank))
        pad_steps(runner, monkeypatch, buckets, graphs[-1])
        engine._agreement.use(runner.uploader.header.agreed)
    start = len(comms[0].calls)
    for sampling in (SAMPLED, SEEDED):
        assert tokens_of(asked(two, **sampling)) == tokens_of(asked(one, **sampling))
    first, second = (comm.calls[start:] for comm in comms)
    assert first == second
    captured = [{each for each in made._captured if isinstance(each, Guess | Follow)} for made in graphs]
    assert all(captured)
    assert captured[0] != captured[1]
    one.close()
    two.close()


def test_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank follows the grammar along the drafts that all have."""
    eagle3: dict[str, Any] = {"spec_method": "eagle3", "spec_tokens": 2}
    one, two = Driver(SHIPPED, **SETTINGS, spec_method="none"), RankDriver(SHIPPED, 2, **SETTINGS, **eagle3)
    grammar = following(**LETTERS) | {"ignore_eos": True}
    found = []
    for driver in (one, two):
        core = CoreDriver(driver)
        core.ignore_times()
        for number, sampling in enumerate(({"temperature": 1.0, "seed": 3, **grammar}, {**grammar})):
            core.send(str(number), PROMPT, 24, sampling)
        core.run()
        driver.close()
        found.append(core)
    assert tokens_of(found[1]) == tokens_of(found[0])
    assert found[1].replica.step_results.acceptance.num_draft_tokens > 0


def test_dummy_weights(tmp_path: Path) -> None:
    """What is measured without checkpoints; ranks have the same drafts, or they would drift."""
    for kind in ("head with the model's embedding", "mtp"):
        path, drafts = KINDS[kind](tmp_path / kind)
        driver = RankDriver(path, 2, **SETTINGS, **drafts, load_format="dummy")
        assert len(tokens_of(asked(driver))) == len(PROMPTS)
        driver.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "few tokens": ({"known": (17, 140)}, "--tensor-parallel-size 4: it knows only 2 tokens"),
    "heads": ({"kv_heads": 3}, "--tensor-parallel-size 4: a model with 6 heads, 3 of them of keys and values, cannot"),
}


@pytest.mark.parametrize(("fields", "why"), REFUSED.values(), ids=REFUSED)
def test_heads_that_ranks_cannot_divide(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    """One error, which names the head, before weights are read."""
    model = ModelConfig.load(make_reference(tmp_path / "model", LLAMA))
    path = TinyHead(model.hidden_size, 307, (1, 0, 1), **fields).save(tmp_path / "head")
    with pytest.raises(ModelError) as error:
        load_eagle3(path, local_config(model, 1, 4))
    assert f"speculative model {path}: {why}" in str(error.value)
