"""Measured launch shapes of experts: those that are shipped are chosen, and a user's come before them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagebus.kernels.common import user_tables
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import SOURCES, Tuned, read_user_tables, user_path
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.tables import table_path
from pagebus.kernels.moe.choice import candidates_for, choose_experts, decide
from pagebus.kernels.moe.launch.rule import by_rule
from pagebus.kernels.moe.launch.shapes import Config, GroupConfig, Grouped, PairConfig, Shape, Specialized, Unsorted
from pagebus.kernels.moe.launch.tables import TABLES, load_table, load_user_table, merge_table
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig
from tests.kernels.moe.measured import MODELS, Measured, measured

H200, BF16 = Target(90, 132, 4917), torch.bfloat16
QWEN3, GPT_OSS = MODELS["qwen3-30b-a3b"], MODELS["gpt-oss-20b"]
UNMEASURED = Shape(128, 8, 4096, 1408)
TILES = GroupConfig(64, 64, 3, 4, tma=True)
ROW = {"experts": 128, "top_k": 8, "hidden": 4096, "width": 1408}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    read_user_tables(None)


def chosen(num_tokens: int, shape: Shape, target: Target = H200) -> tuple[Config, Source]:
    return decide(num_tokens, shape, BF16, target)[:2]


def test_what_was_measured_is_chosen() -> None:
    """The raw output of benchmarks names these launch shapes: of few tokens, and of prompts since Hopper's kernel."""
    decodes = [each for each in measured("experts.txt") if each.model == "qwen3-30b-a3b" and each.tokens < 1024]
    prompts = list(measured("experts-prompts.txt"))
    assert {each.model for each in prompts} == {"qwen3-30b-a3b", "deepseek-v2-lite"}
    each: Measured
    for each in (*decodes, *prompts):
        assert chosen(each.tokens, each.shape) == (each.config, Source.MEASURED), each
    many = Specialized(128, SpecializedConfig(256), SpecializedConfig(256))
    assert [chosen(tokens, GPT_OSS)[0] for tokens in (1, 64, 4096)] == [
        Unsorted(PairConfig(2, 256, 2), PairConfig(4, 1024, 8, 4)),
        Grouped(16, GroupConfig(64, 64, 4, 4, tma=True), TILES),
        many,
    ]


@pytest.mark.parametrize("model", MODELS)
def test_measured_models_keep_the_rules_launch_shapes(model: str) -> None:
    """They were measured as the rule chooses: at every number of tokens, on GPUs of this kind."""
    for tokens in (*range(1, 1100), 2000, 4096, 8192, 20_000):
        assert chosen(tokens, MODELS[model]) == (by_rule(tokens, MODELS[model], BF16, H200), Source.MEASURED)
    assert chosen(64, MODELS[model], Target(80, 108))[1] is Source.MODEL


def test_keys_are_named() -> None:
    """By the experts' sizes and the model, and by the number of tokens."""
    rows = json.loads(table_path(H200, TABLES).read_text())
    assert {Shape(*(row[name] for name in Shape._fields)): row["model"] for row in rows} == {
        QWEN3: "Qwen3-30B-A3B", MODELS["deepseek-v2-lite"]: "DeepSeek-V2-Lite", GPT_OSS: "gpt-oss-20b",
        MODELS["mixtral-8x7b"]: "Mixtral-8x7B",
    }  # fmt: skip
    assert {name for row in rows for each in row["buckets"].values() for name in each} == {
        "kernel", "tokens", "gate_up", "down",
    }  # fmt: skip


def test_a_users_table_comes_first(tmp_path: Path) -> None:
    """For the buckets that it has; others are chosen as before. A bucket's choice holds for fewer tokens."""
    config = Grouped(32, TILES, TILES)
    for shape in (QWEN3, UNMEASURED):
        merge_table(user_path(H200, tmp_path, Tuned.EXPERTS), shape, {256: config})
    before = chosen(64, UNMEASURED)
    read_user_tables(tmp_path)
    for shape in (QWEN3, UNMEASURED):
        assert [chosen(tokens, shape) for tokens in (256, 200)] == [(config, Source.USER)] * 2
    assert chosen(512, QWEN3)[1] is Source.MEASURED
    assert chosen(64, UNMEASURED) == before
    assert choose_experts(256, QWEN3, BF16, H200, invariant=True).config != config
    assert choose_experts(256, QWEN3, torch.float32, H200).config != config
    read_user_tables(None)
    assert chosen(256, QWEN3)[1] is Source.MEASURED


def test_a_table_holds_what_it_was_given(tmp_path: Path) -> None:
    """Every kind of launch shape, each with its bucket; rows stay when others come, and what is new replaces."""
    path = tmp_path / "table.json"
    first = {8: Unsorted(PairConfig(2, 256, 2), PairConfig(4, 512, 8, 4)), 64: Grouped(16, TILES, TILES)}
    merge_table(path, UNMEASURED, first, model="one")
    merge_table(path, QWEN3, {4096: Specialized(128, SpecializedConfig(128), SpecializedConfig(256))})
    merge_table(path, UNMEASURED, {64: Grouped(32, TILES, TILES)})
    assert load_table(path) == {
        QWEN3: {4096: Specialized(128, SpecializedConfig(128), SpecializedConfig(256))},
        UNMEASURED: {8: first[8], 64: Grouped(32, TILES, TILES)},
    }


def test_other_versions_have_other_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton and of the kernels; and dense products have another than experts."""
    merge_table(user_path(H200, tmp_path, Tuned.EXPERTS), QWEN3, {256: Grouped(32, TILES, TILES)})
    assert load_user_table(H200, tmp_path)
    assert user_path(H200, tmp_path) != user_path(H200, tmp_path, Tuned.EXPERTS)
    with monkeypatch.context() as patch:
        patch.setattr(user_tables, "_triton_version", lambda: "9.9.9")
        assert load_user_table(H200, tmp_path) == {}
    for name in SOURCES[Tuned.EXPERTS]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("before")
    before = user_tables._sources_digest.__wrapped__(tmp_path, Tuned.EXPERTS)
    (tmp_path / "moe/grouped.py").write_text("after")
    assert user_tables._sources_digest.__wrapped__(tmp_path, Tuned.EXPERTS) != before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        json.dumps([{"experts": 128}]),
        json.dumps([{**ROW, "buckets": {"64": {"kernel": "sorcery"}}}]),
        json.dumps([{**ROW, "buckets": {"64": {"kernel": "moe_torch"}}}]),
        json.dumps([{**ROW, "buckets": {"64": {"kernel": "moe_grouped", "tokens": 16, "gate_up": {}, "down": {}}}}]),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, text: str) -> None:
    """It only makes steps faster: a start goes on without."""
    user_path(H200, tmp_path, Tuned.EXPERTS).write_text(text)
    assert load_user_table(H200, tmp_path) == {}


@pytest.mark.parametrize(
    ("bucket", "config"),
    [
        (65, Grouped(16, TILES, TILES)),
        (64, Grouped(24, TILES, TILES)),
        (64, Grouped(16, TILES, GroupConfig(64, 48, 3, 4, tma=True))),
        (64, Specialized(64, SpecializedConfig(256), SpecializedConfig(256))),
        (64, Specialized(128, SpecializedConfig(192), SpecializedConfig(256))),
    ],
)
def test_what_cannot_be_launched_is_ignored(tmp_path: Path, bucket: int, config: Config) -> None:
    """No bucket, no items of that size, no launch shape that is timed."""
    merge_table(user_path(H200, tmp_path, Tuned.EXPERTS), UNMEASURED, {bucket: config})
    assert load_user_table(H200, tmp_path) == {}
    known = candidates_for(64, UNMEASURED, H200, 1)[0].config
    merge_table(user_path(H200, tmp_path, Tuned.EXPERTS), QWEN3, {64: known})
    assert load_user_table(H200, tmp_path) == {QWEN3: {64: known}}
