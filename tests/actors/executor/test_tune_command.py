"""``pagebus tune``: what it measures, what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pagebus.actors.executor.tune_command
import pagebus.actors.executor.tuning.tune
import pagebus.kernels.linear.tuning.tune
import pagebus.kernels.moe.tune
from pagebus.actors.bench.driver.shapes import SHAPES
from pagebus.actors.commands.cli import main
from pagebus.actors.executor.loading import kernel_cache
from pagebus.actors.executor.tune_command import measurable
from pagebus.actors.executor.tuning.changes import Measurable
from pagebus.actors.executor.tuning.compiler import Wanted
from pagebus.actors.executor.tuning.tune import TunedStep
from pagebus.actors.model.config import ModelConfig
from pagebus.actors.model.quantization.asked import with_quantization
from pagebus.actors.model.shards.stages import rank_config
from pagebus.actors.settings import Settings
from pagebus.kernels.attention.forms.form import DecodeHeads
from pagebus.kernels.common.target import Target, compile_for
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.shapes import BUCKETS, Product
from pagebus.kernels.linear.tables import merge_table
from pagebus.kernels.linear.tuning.tune import Timed
from pagebus.kernels.moe.choice import choose
from pagebus.kernels.moe.launch.shapes import Shape
from pagebus.kernels.moe.launch.tables import merge_table as merge_experts
from pagebus.kernels.moe.tune import TimedExperts

H200 = Target(90, 132, 4917)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    compile_for(None)
    read_user_tables(None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama8b"]))
    return tmp_path


def test_without_a_gpu_it_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(folder), "--device", "cpu"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_stages_are_refused_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their products are those of the whole model."""
    assert main(["tune", str(folder), "-pp", "2"]) == 2
    assert "not with stages" in capsys.readouterr().err


@pytest.mark.parametrize("minutes", ["0", "-1", "1e9"])
def test_minutes_are_a_time(folder: Path, minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(folder), "--minutes", minutes]) == 2
    assert "--minutes" in capsys.readouterr().err


def test_it_measures_every_product_of_the_model(folder: Path) -> None:
    """Each once; sums before the norms that take their place. None in float32 or with ``--deterministic``."""
    config = ModelConfig.load(folder)
    products, experts, heads = measurable(Settings(model=str(folder)), config, H200)
    names = [product.name for product in products]
    assert experts is None
    assert heads == DecodeHeads(8, 4, 128, 2)
    assert names == [
        "plain:6144x4096", "wide:128256x4096", "gated:28672x4096", "partial:4096x4096", "partial:4096x14336",
        "residual:4096x4096", "residual:4096x14336",
    ]  # fmt: skip
    assert measurable(Settings(model=str(folder), dtype="float32"), config, H200) == ([], None, None)
    assert measurable(Settings(model=str(folder), deterministic=True), config, H200) == ([], None, None)


def test_of_a_rank_it_measures_the_parts(folder: Path) -> None:
    """Those that are summed over ranks add themselves to nothing, and begin no norm."""
    settings = Settings(model=str(folder), tensor_parallel_size=2)
    products, _, heads = measurable(settings, rank_config(ModelConfig.load(folder), settings), H200)
    assert [product.name for product in products] == [
        "plain:3072x4096", "wide:64128x4096", "gated:14336x4096", "partial:4096x2048", "partial:4096x7168",
    ]  # fmt: skip
    assert heads == DecodeHeads(4, 4, 128, 2)


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an H200 were here, on which nothing is measured."""
    monkeypatch.setattr(pagebus.actors.executor.tune_command, "first_target", lambda: H200)
    monkeypatch.setattr(pagebus.actors.executor.tune_command, "find_spec", lambda _: True)


@pytest.mark.usefixtures("_gpu")
def test_it_tunes_and_says_where_the_table_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder that is named, for the GPU here, in steps of the tokens that are named."""
    asked: list[Any] = []

    def tune(
        wanted: Wanted, todo: Measurable, target: Target, where: Path, minutes: float, tell: Any, tokens: list[int]
    ) -> list[TunedStep]:
        asked.append((wanted.dtype, wanted.cache_dtype, len(todo.products), target, where, minutes, tokens))
        tell("one line")
        return [TunedStep(8, 2.0, 1.5), TunedStep(1, 2.0, 2.0)]

    monkeypatch.setattr(pagebus.actors.executor.tuning.tune, "tune_steps", tune)
    shapes = folder / "shapes"
    options = ["--minutes", "2.5", "--launch-shapes-dir", str(shapes), "--kv-cache-dtype", "int8"]
    assert main(["tune", str(folder), "--tokens", "1", "8", *options]) == 0
    assert main(["tune", str(folder), "--tokens", "1", "8", "-tp", "2", *options]) == 0
    of_rank = (torch.bfloat16, torch.int8, 5, H200, shapes, 2.5, [1, 8])
    assert asked == [(torch.bfloat16, torch.int8, 7, H200, shapes, 2.5, [1, 8]), of_rank]
    text = capsys.readouterr().out
    assert "one line" in text
    assert "1 of 2 choices are changed, the best by 25%" in text
    assert str(user_path(H200, shapes)) in text


@pytest.mark.usefixtures("_gpu")
def test_a_model_that_only_pools_is_timed_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no decode steps: an embedding model, or a decoder that weighs two tokens."""
    asked: list[int] = []

    def tune(products: list[Product], *_: object, **__: object) -> list[Timed]:
        asked.append(len(products))
        return [Timed(products[0], 8, 20.0, 15.0, None, changed=True)]

    monkeypatch.setattr(pagebus.kernels.linear.tuning.tune, "tune", tune)
    (folder / "config.json").write_text(json.dumps(SHAPES["llama8b"] | {"architectures": ["LlamaModel"]}))
    assert main(["tune", str(folder), "--launch-shapes-dir", str(folder)]) == 0
    (folder / "config.json").write_text(json.dumps(SHAPES["llama8b"]))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"no": 5, "yes": 7}}}))
    weighs = ["--classifier-from-token", "no", "yes"]
    assert main(["tune", str(folder), *weighs, "--launch-shapes-dir", str(folder)]) == 0
    assert len(asked) == 2


def test_buckets_are_those_of_products() -> None:
    """Written down once more, as those import torch."""
    assert pagebus.actors.executor.tune_command.BUCKETS == BUCKETS


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A model whose layers have experts."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen30b-a3b"]))
    return tmp_path


def test_experts_are_measured_in_16_bits(mixture: Path) -> None:
    """Beside dense products, which have no forms of experts."""
    config = ModelConfig.load(mixture)
    products, experts, _ = measurable(Settings(model=str(mixture)), config, H200)
    assert experts == Shape(128, 8, 2048, 768)
    assert [product.name for product in products] == [
        "plain:5120x2048", "wide:128x2048", "wide:151936x2048", "partial:2048x4096",
    ]  # fmt: skip
    for setting in ({"dtype": "float32"}, {"deterministic": True}, {"quantization": "fp8"}):
        asked = Settings(model=str(mixture), **setting)
        assert measurable(asked, with_quantization(asked, config), H200).experts is None


@pytest.mark.usefixtures("_gpu")
def test_steps_come_before_experts_of_more_tokens(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have half of the time, the others what is left; both tables are named."""
    asked: list[tuple[float, int]] = []

    def tune_experts(
        shape: Shape, target: Target, where: Path, minutes: float, tell: Any, _: object, above: int
    ) -> list[TimedExperts]:
        asked.append((minutes, above))
        config = choose(512, shape, torch.bfloat16, target)
        return [TimedExperts(shape, 512, 20.0, 10.0, config, changed=True)]

    def tune(
        wanted: Wanted, todo: Measurable, target: Target, where: Path, minutes: float, *_: object
    ) -> list[TunedStep]:
        asked.append((minutes, len(todo.products)))
        return [TunedStep(8, 20.0, 15.0)]

    clock = iter([100.0, 160.0])  # the begin, and the end of steps
    monkeypatch.setattr(pagebus.actors.executor.tune_command, "monotonic", lambda: next(clock))
    monkeypatch.setattr(pagebus.kernels.moe.tune, "tune_experts", tune_experts)
    monkeypatch.setattr(pagebus.actors.executor.tuning.tune, "tune_steps", tune)
    assert main(["tune", str(mixture), "--minutes", "4", "--launch-shapes-dir", str(mixture)]) == 0
    assert asked == [(2.0, 4), (3.0, BUCKETS[-1])]
    text = capsys.readouterr().out
    assert "2 of 2 choices are changed, the best by 50%" in text
    assert str(user_path(H200, mixture)) in text
    assert str(user_path(H200, mixture, Tuned.EXPERTS)) in text


def test_kernels_are_compiled_anew_for_a_new_table(folder: Path) -> None:
    """The mark of a complete cache is another then, of either table."""
    config, settings = ModelConfig.load(folder), Settings(model=str(folder), launch_shapes_dir=str(folder / "shapes"))
    before = kernel_cache.mark_path(settings, config, H200)
    merge_table(user_path(H200, folder / "shapes"), Product("plain", 64, 64), {8: None})
    assert kernel_cache.mark_path(settings, config, H200) != before
    dense = kernel_cache.mark_path(settings, config, H200)
    shape, path = Shape(8, 2, 64, 64), user_path(H200, folder / "shapes", Tuned.EXPERTS)
    merge_experts(path, shape, {8: choose(8, shape, torch.bfloat16, H200)})
    assert kernel_cache.mark_path(settings, config, H200) not in (before, dense)
