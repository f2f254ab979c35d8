"""Small models that draft for others: tokens are those without, and drafts those of transformers, whatever happened to
the blocks in which their keys and values lie."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagebus.actors.executor.batch.buckets import Buckets
from pagebus.actors.executor.explain import AbsentEngine
from pagebus.actors.executor.loading import loading
from pagebus.actors.model.config import ModelConfig, ModelError
from pagebus.actors.settings import Settings
from pagebus.kernels.common.target import Target
from tests.actors.executor.eager_graphs import use_eager_graphs
from tests.actors.executor.small_engine import SETTINGS
from tests.actors.executor.speculation.checks import (
    LLAMA,
    MISTRAL,
    NUM_TOKENS,
    PROMPTS,
    SAMPLINGS,
    SEEDED,
    accepted,
    asked,
    texts_of,
    tokens_of,
)
from tests.actors.executor.speculation.test_heads import GEMMA, drafted
from tests.actors.scheduler.rests import rest_often
from tests.helpers.core_driver import CoreDriver
from tests.helpers.engine_driver import Driver
from tests.helpers.model_factory import REFERENCE_CONFIGS, load_reference, make_golden, make_reference

pytestmark = pytest.mark.share(6)

SMALLER, WIDER, HALVED = (
    next(config for config in REFERENCE_CONFIGS if config.name == name)
    for name in ("qwen3-5q5kv-d64", "mistral-3q3kv-d96", "qwen2-6q3kv-d80")
)
PAIRS: dict[str, tuple[Any, Any]] = {
    "itself": (LLAMA, LLAMA),
    "another": (LLAMA, SMALLER),
    "windows": (MISTRAL, WIDER),
    "pages": (None, HALVED),
}
"""Models and what drafts for them. Of windows the smaller one holds: the model's cache has no more. The last model has
pages of its own for layers with windows; what drafts for it has such layers too."""


@dataclass(frozen=True)
class Pair:
    """An engine without drafts, one with, and the folders of the model, of what drafts, and of its reference."""

    plain: Driver
    drafting: Driver
    model: Path
    draft: Path
    reference: Path

    def check(self, found: list[tuple[list[int], list[int]]]) -> None:
        """Drafts are the likeliest tokens, one by one."""
        assert found
        reference = load_reference(self.reference)
        for tokens, drafts in found:
            with torch.inference_mode():
                logits = reference(torch.tensor([[*tokens, *drafts]])).logits[0, len(tokens) - 1 : -1]
            assert logits.argmax(-1).tolist() == list(drafts)


def told(draft: Path) -> dict[str, Any]:
    return {"spec_method": "draft_model", "spec_model": str(draft), "spec_tokens": 4}


def pairs(folder: Path, name: str, settings: dict[str, Any] = SETTINGS) -> Iterator[Pair]:
    config, drafts = PAIRS[name]
    path = folder / "model"
    path = make_reference(path, config) if config else make_golden(path, "gemma3_text", GEMMA)
    draft = reference = path if config is drafts else make_reference(folder / "draft", drafts)
    if config is MISTRAL:
        reference = shutil.copytree(draft, folder / "windowed")
        changed(reference, sliding_window=MISTRAL.overrides["sliding_window"])
    pair = Pair(
        Driver(path, **settings, spec_method="none"), Driver(path, **settings, **told(draft)), path, draft, reference
    )
    yield pair
    pair.plain.close()
    pair.drafting.close()


def changed(folder: Path, **fields: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))
    return folder


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from pairs(tmp_path_factory.mktemp("pair"), request.param)


fewer = pytest.mark.parametrize("pair", ["another", "pages"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def itself(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    yield from pairs(tmp_path_factory.mktemp("itself"), "itself")


def share(core: CoreDriver) -> float:
    """Of drafts that were accepted."""
    return accepted(core) / core.replica.step_results.acceptance.num_draft_tokens


@pytest.mark.parametrize("sampling", [{}, SEEDED, SAMPLINGS["penalties"]], ids=["greedy", "seeded", "penalties"])
def test_tokens_are_those_without(pair: Pair, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And drafts are those of transformers: behind chunks of prompts, accepted and rejected drafts, beside others."""
    found = drafted(pair.drafting, monkeypatch)
    assert tokens_of(asked(pair.drafting, **sampling)) == tokens_of(asked(pair.plain, **sampling))
    pair.check(found[:4] + found[-4:])


def test_a_model_drafts_for_itself(itself: Pair) -> None:
    """All its greedy drafts are right, up to rounding."""
    found = asked(itself.drafting)
    assert share(found) > 0.95
    assert accepted(found) > len(found.results)


def test_steps_that_want_no_drafts(itself: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they compute is in the cache of the draft model too."""
    rest_often(monkeypatch)
    found = drafted(itself.drafting, monkeypatch)
    assert tokens_of(asked(itself.drafting, **SEEDED)) == tokens_of(asked(itself.plain, **SEEDED))
    itself.check(found[-8:])


@fewer
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_few_blocks(pair: Pair, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are preempted with drafts in flight, and come back from the host or are computed again."""
    found = drafted(pair.drafting, monkeypatch)
    limits = {"num_blocks": 9 * (1 + pair.drafting.info.windowed_pages)}
    if mode == "recompute":
        limits["num_host_blocks"] = 0
    few = CoreDriver(pair.drafting, limits=limits, preemption_mode=mode)
    for number, prompt in enumerate(PROMPTS):
        few.send(str(number), prompt, NUM_TOKENS, SEEDED)
    few.run()
    assert [answer.tokens for answer in few.answers.values()] == tokens_of(asked(pair.plain, **SEEDED))
    assert few.preempted
    assert any(len(plan.swap_in_blocks) for plan in few.plans) == (mode == "swap")
    pair.check(found[-8:])


@fewer
def test_found_in_the_cache(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that goes on with an answer finds its blocks, and what the draft model has in them."""
    expected, found = asked(pair.plain, **SEEDED), asked(pair.drafting, **SEEDED)
    watched = drafted(pair.drafting, monkeypatch)
    for core in (expected, found):
        for number, text in enumerate(texts_of(core)):
            core.send(f"again {number}", text, 9, SEEDED)
        core.run()
    assert tokens_of(found) == tokens_of(expected)
    assert sum(answer.cached for name, answer in found.answers.items() if name.startswith("again")) >= 16 * len(PROMPTS)
    pair.check(watched[:8])


def test_several_choices(itself: Pair) -> None:
    """Choices share blocks of their prompt, and copy what they write to."""
    cores = [CoreDriver(driver) for driver in (itself.plain, itself.drafting)]
    for core in cores:
        core.send("choices", [9, 8, 7, 6] * 5, NUM_TOKENS, {"n": 3, "temperature": 0.4, "seed": 3})
        core.run()
    assert tokens_of(cores[1]) == tokens_of(cores[0])
    assert accepted(cores[1]) > NUM_TOKENS


def test_padded_steps(itself: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From graphs, in which the draft model computes the step's tokens too."""
    expected = asked(itself.plain)
    graphs = use_eager_graphs(itself.drafting, monkeypatch, Buckets(6, 64, 4, max_samples=30, max_verified=30))
    monkeypatch.setattr(
        itself.drafting.engine._loaded.runner.inputs, "context_lens", torch.zeros(64, dtype=torch.int32)
    )
    found = asked(itself.drafting)
    assert tokens_of(found) == tokens_of(expected)
    assert graphs.replayed
    assert share(found) > 0.95


def test_decodes_as_prompts(itself: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``--deterministic`` lays them out, which a CPU refuses only because its products are not bitwise the same."""
    monkeypatch.setattr(loading, "check_attention", lambda settings, device: None)
    driver = Driver(itself.model, **SETTINGS, **told(itself.draft), deterministic=True)
    found = asked(driver)
    assert tokens_of(found) == tokens_of(asked(itself.plain))
    assert share(found) > 0.95
    driver.close()


def test_an_executor_dies(itself: Pair) -> None:
    """Another goes on from the tokens alone, and its draft model reads them anew."""
    expected, core = tokens_of(asked(itself.plain)), CoreDriver(itself.drafting)
    for number, prompt in enumerate(PROMPTS):
        core.send(str(number), prompt, NUM_TOKENS)
    core.run(until=lambda: sum(len(answer.tokens) for answer in core.answers.values()) > 40)
    successor = Driver(itself.model, **SETTINGS, **told(itself.draft))
    core.lose(successor)
    core.run()
    assert [answer.tokens for answer in core.answers.values()] == expected
    assert share(core) > 0.95
    successor.close()


@fewer
def test_a_block_has_room_for_both(pair: Pair) -> None:
    """For all layers of the draft model beside those of the model; in each page, where there are several."""
    raw, info = json.loads((pair.draft / "config.json").read_text()), pair.drafting.info
    numbers = 2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * raw["head_dim"]
    assert info.block_bytes == pair.plain.info.block_bytes + info.block_size * numbers * 4


def test_dummy_weights(itself: Pair) -> None:
    """What is measured without checkpoints: the draft model is then the same as the model, if it has its sizes."""
    driver = Driver(itself.model, **SETTINGS, **told(itself.draft), load_format="dummy")
    assert share(asked(driver)) > 0.95
    driver.close()


LARGE = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 512}
"""A model on a GPU; what drafts for it may be otherwise where the kernels are the same."""
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "smaller heads": ({"head_dim": 64, "num_attention_heads": 8}, {}, ""),
    "one group": ({"num_attention_heads": 8}, {"deterministic": True}, ""),
    "larger heads": ({"head_dim": 256}, {}, "its heads have 256 numbers, those of the model only 128"),
    "more heads": ({"num_attention_heads": 40}, {}, "it has 40 heads, the model only 32"),
    "more heads share keys": (
        {"num_key_value_heads": 4}, {"deterministic": True}, "8 of its heads share keys, more than of the model's"
    ),
    "odd heads": (
        {"head_dim": 72}, {},
        "long prompts would take another kernel in it (cudnn_prefill) than in the model (hopper_prefill)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "settings", "why"), UNLIKE.values(), ids=UNLIKE)
def test_kernels_of_a_gpu(tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], why: str) -> None:
    """Prompts are cut once, for the attention of both."""
    model = changed(make_reference(tmp_path / "model", LLAMA), **LARGE)
    draft = changed(shutil.copytree(model, tmp_path / "draft"), **changes)
    asked_for = Settings(model=str(model), dtype="bfloat16", max_model_len=256, **told(draft), **settings)
    refused = pytest.raises(ModelError, match=re.escape(why)) if why else nullcontext()
    with refused:
        AbsentEngine(asked_for, ModelConfig.load(model), Target(90, 132))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 300}, "should have the same vocabulary size: it has 300 tokens, the model 307"),
    "quantized": (
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        "quantized draft models are not supported",
    ),
    "experts": (
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4},
        "MixtralForCausalLM is not supported as a draft model (only dense decoders)",
    ),
    "tensors": ({"num_hidden_layers": 3}, "the weights lack tensor model.layers.2."),
    "encoder": ({"architectures": ["LlamaModel"]}, "LlamaModel does not generate"),
}


@pytest.mark.parametrize(("changes", "why"), BROKEN.values(), ids=BROKEN)
def test_models_that_cannot_draft(itself: Pair, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    """One error, which names the folder, before the engine is ready."""
    broken = changed(shutil.copytree(itself.draft, tmp_path / "draft"), **changes)
    with pytest.raises(ModelError) as error:
        Driver(itself.model, **SETTINGS, **told(broken))
    assert f"speculative model {broken}: " in str(error.value)
    assert why in str(error.value)
