"""Ranks with heads, MTP layers and small models that draft: each has a part of these too, and all have the drafts of
one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import (
    LLAMA,
    SAMPLINGS,
    SEEDED,
    accepted,
    asked,
    tokens_of,
)
from tests.actors.executor.speculation.test_draft_model import HALVED, SMALLER, told
from tests.actors.executor.speculation.test_heads import drafted
from tests.actors.executor.speculation.test_mtp import MTP, made
from tests.actors.executor.speculation.tiny_head import TinyHead
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import DEFAULTS, make_reference
from tests.helpers.ranks.rank_driver import RankDriver

KNOWN = (1, 2, 4, 5, 7)
"""To heads; MTP layers say one of few tokens, too."""
SAMPLED: dict[str, Any] = {"allowed_token_ids": KNOWN, "temperature": 2.0, "seed": 5}
ASKED: list[dict[str, Any]] = [{}, SEEDED, SAMPLED, SAMPLINGS["penalties"]]


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

    plain: Driver
    one: Driver
    ranks: RankDriver


def engines(folder: Path, kind: str, world: int, **settings: Any) -> Iterator[Engines]:
    path, drafts = KINDS[kind](folder)
    given = SETTINGS | settings
    made = Engines(
        Driver(path, **given, spec_method="none"), Driver(path, **given, **drafts),
        RankDriver(path, world, **given, **drafts),
    )  # fmt: skip
    yield made
    for driver in (made.plain, made.one, made.ranks):
        driver.close()


@pytest.fixture(scope="module", params=KINDS)
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
    """Prompts in chunks, rejected drafts, sequences beside each other; some drafts are right."""
    assert sum(check(two, sampling, monkeypatch) for sampling in ASKED) > 0


@pytest.mark.parametrize("kind", ["head with the model's embedding", "mtp of latents", "itself"])
def test_four_ranks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are heads of keys."""
    for each in engines(tmp_path, kind, 4):
        assert sum(check(each, sampling, monkeypatch) for sampling in ({}, SAMPLED)) > 0
