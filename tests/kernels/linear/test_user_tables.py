"""A user's table: written by tuning, read by the next start, and ignored when anything it depends on has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from pagebus.kernels.attention.forms.launch import DecodeConfig
from pagebus.kernels.common import user_tables
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.dispatch import Source, choose_product
from pagebus.kernels.linear.shapes import BUCKETS, KERNELS, Config, Product
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.tables import load_user_table, merge_table
from pagebus.kernels.linear.tuning import tune
from pagebus.kernels.moe.launch.shapes import PRODUCT_CONFIGS

H200 = Target(90, 132, 4917)
PRODUCT = Product("plain", 5120, 2880)
CONFIG = TileConfig(64, 16, 256, 3, 4, tma=True)


@pytest.fixture(autouse=True)
def _no_table_is_left() -> Iterator[None]:
    yield
    read_user_tables(None)


def chosen(product: Product = PRODUCT, num_tokens: int = 8, target: Target = H200) -> tuple[Source, Config | None]:
    choice = choose_product(*product[:1], num_tokens, *product[1:3], torch.bfloat16, target)
    return choice.source, choice.config


def test_it_comes_first(tmp_path: Path) -> None:
    """Before the cost model and before what is shipped, for the tokens that it has; until it is not read any more."""
    shipped = Product("plain", 6144, 4096)
    before = chosen(), chosen(shipped)
    merge_table(user_path(H200, tmp_path), PRODUCT, {8: CONFIG, 16: None})
    merge_table(user_path(H200, tmp_path), shipped, {8: None})
    assert (chosen(), chosen(shipped)) == before

    read_user_tables(tmp_path)
    assert chosen() == (Source.USER, CONFIG)
    assert chosen(num_tokens=5) == (Source.USER, CONFIG)
    assert chosen(num_tokens=16) == (Source.USER, None)
    assert chosen(num_tokens=32)[0] is Source.MODEL
    assert chosen(shipped) == (Source.USER, None)
    assert chosen(shipped, 16)[0] is Source.MEASURED

    read_user_tables(None)
    assert (chosen(), chosen(shipped)) == before


def test_another_gpu_version_or_kernel_does_not_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name says all that it depends on."""
    merge_table(user_path(H200, tmp_path), PRODUCT, {8: CONFIG})
    assert load_user_table(H200, tmp_path)
    for other in (Target(90, 132, 3352), Target(90, 114, 4917), Target(100, 132, 4917)):
        assert load_user_table(other, tmp_path) == {}
    with monkeypatch.context() as patch:
        patch.setattr(user_tables, "_triton_version", lambda: "9.9.9")
        assert load_user_table(H200, tmp_path) == {}
    with monkeypatch.context() as patch:
        patch.setattr(user_tables, "_sources_digest", lambda *_: "0" * 12)
        assert load_user_table(H200, tmp_path) == {}
    assert load_user_table(H200, tmp_path)


def test_the_digest_is_that_of_the_kernels_sources(tmp_path: Path) -> None:
    """A changed kernel has another."""
    for name in user_tables.SOURCES[Tuned.PRODUCTS]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")
    before = user_tables._sources_digest.__wrapped__(tmp_path, Tuned.PRODUCTS)
    (tmp_path / user_tables.SOURCES[Tuned.PRODUCTS][0]).write_text("after")
    assert user_tables._sources_digest.__wrapped__(tmp_path, Tuned.PRODUCTS) != before


def source_of(value: Any) -> str:
    """The file of a class or a function, as `SOURCES` names it."""
    module: str = value.__module__
    return module.removeprefix("pagebus.kernels.").replace(".", "/") + ".py"


def compiled(names: Mapping[str, Any], wanted: Iterable[str]) -> list[Any]:
    """What Triton or Gluon compiles of our own, before it is compiled."""
    found = (getattr(names.get(name), "fn", None) for name in wanted)
    return [function for function in found if isinstance(function, FunctionType) and "pagebus" in function.__module__]


@pytest.mark.parametrize(
    ("tuned", "shapes"),
    [(Tuned.PRODUCTS, KERNELS), (Tuned.EXPERTS, PRODUCT_CONFIGS.values()), (Tuned.ATTENTION, [DecodeConfig])],
)
def test_sources_are_of_all_that_is_compiled(tuned: Tuned, shapes: Iterable[type]) -> None:
    """Launch shapes, what is launched in them, and the functions that it calls; but for those of adapters, of which
    tuning has none."""
    named = {*user_tables.SOURCES[tuned]}
    assert {source_of(shape) for shape in shapes} <= named
    todo, found = [], set()
    for name in named:
        names = vars(import_module(f"pagebus.kernels.{name.removesuffix('.py').replace('/', '.')}"))
        todo += compiled(names, names)
    while todo:
        function = todo.pop()
        if function not in found and not source_of(function).startswith("lora/"):
            found.add(function)
            todo += compiled(function.__globals__, function.__code__.co_names)
    assert {source_of(function) for function in found} <= named


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"form": 1}',
        '[{"form": "plain", "rows": 5120, "inputs": 2880, "buckets": {"8": {"kernel": "sorcery"}}}]',
        '[{"form": "plain", "rows": 5120, "inputs": 2880, "buckets": {"8": {"kernel": "gemv", "speed": 1}}}]',
        '[{"form": "plain", "rows": 5120, "inputs": 2880, "buckets": {"7": {"kernel": "cublas"}}}]',
        '[{"form": "plain", "rows": 5120, "inputs": 2880, "buckets": {"64": {"kernel": "gemv", "rows": 2, "depth": 512,'
        ' "warps": 2}}}]',
    ],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, text: str) -> None:
    """It only makes steps faster: a start goes on without."""
    user_path(H200, tmp_path).write_text(text)
    assert load_user_table(H200, tmp_path) == {}


class FakeTimer:
    """Tells times of its own."""

    def __init__(self, library: float, best: Config | None) -> None:
        self.asked: list[tuple[Product, int]] = []
        self._library, self._best = library, best

    def times(self, product: Product, bucket: int, configs: dict[Config | None, None]) -> dict[Config | None, float]:
        self.asked.append((product, bucket))
        return {
            config: self._library if config is None else 10.0 if config == self._best else 20.0 for config in configs
        }


class NoCompilers:
    """Compile nothing."""

    def compile(self, jobs: object) -> tuple[str, ...]:
        return ()


def run_tune(folder: Path, timer: FakeTimer, clock: Iterator[float]) -> tuple[list[tune.Timed], list[str]]:
    lines: list[str] = []
    found = tune.tune(
        [PRODUCT], H200, folder, 1.0, lines.append, NoCompilers(), clock=lambda: next(clock), timer=timer  # type: ignore[arg-type]
    )  # fmt: skip
    return found, lines


def test_tuning_writes_what_is_fastest(tmp_path: Path) -> None:
    """And the next start chooses it; what is measured again stays."""
    second = tune.candidates_for(PRODUCT, 8, H200, tune.BEST)[1]
    found, lines = run_tune(tmp_path, FakeTimer(15.0, second), iter([0.0] * 100))
    assert {each.bucket for each in found} == set(BUCKETS)
    assert set(tune.ORDER) == set(BUCKETS)
    read_user_tables(tmp_path)
    assert chosen() == (Source.USER, second)
    assert any("8 tokens" in line and "less" in line for line in lines)
    again, _ = run_tune(tmp_path, FakeTimer(15.0, second), iter([0.0] * 100))
    assert not any(each.changed for each in again)


def test_what_is_hardly_faster_changes_nothing(tmp_path: Path) -> None:
    """The library keeps its place if it is within 2%."""
    before = chosen(num_tokens=256)
    assert before[1] is None
    found, _ = run_tune(tmp_path, FakeTimer(10.1, tune.candidates_for(PRODUCT, 256, H200, 1)[0]), iter([0.0] * 100))
    (of_many,) = (each for each in found if each.bucket == 256)
    assert (of_many.config, of_many.changed) == (None, False)


def test_time_ends(tmp_path: Path) -> None:
    """Nothing begins when it is over; what was measured is kept, and the rest chosen as before."""
    timer = FakeTimer(1.0, None)
    found, lines = run_tune(tmp_path, timer, iter([0.0, 0.0, 61.0]))
    assert [each.bucket for each in found] == [tune.ORDER[0]]
    assert "time is over" in lines[-1]
    assert set(load_user_table(H200, tmp_path)[PRODUCT]) == {tune.ORDER[0]}
