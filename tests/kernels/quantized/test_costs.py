"""Estimates of products with quantized weights, against what an H200 took, and what is chosen and tuned by them."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import pagebus.kernels.linear.tuning.tune
from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import read_user_tables
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import BUCKETS, Config, Product, is_legal
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.tuning.timing import Compilers
from pagebus.kernels.linear.tuning.tune import GAIN, Timer, tune
from pagebus.kernels.quantized.candidates import FOLDER, resources
from pagebus.kernels.quantized.choice import MARGIN, choose_quantized
from pagebus.kernels.quantized.coding import Kind, coded_of, kind_of
from pagebus.kernels.quantized.costs import QuantizedCosts
from pagebus.kernels.quantized.tuning.timing import random_layout
from pagebus.kernels.quantized.tuning.tune import sort_of
from tests.kernels.quantized.compile_shapes import COMPILED, variants
from tests.kernels.warm import run

ROOT = Path(__file__).parents[3]
MEASUREMENTS = ROOT / "docs/measurements/h200-quantized"
H200, A100 = Target(90, 132, 4917), Target(80, 108, 2039)
FP8, INT4 = Kind(Code.E4M3, rounded=True), Kind(Code.WORDS, 1, 128, zeros=True)
FLOAT = r"([\d.]+)"
Times = dict[tuple[Product, int], dict[Config, float]]


def _times(name: str, head: str, line: str, parse: Callable[[re.Match[str]], Config], kind: Kind) -> Times:
    """Microseconds of launch shapes, as a trial printed them."""
    found: Times = {}
    for text in (MEASUREMENTS / name).read_text().splitlines():
        if start := re.match(head, text):
            times = found.setdefault((Product.parse(f"{start[1]}:{kind.name}"), int(start[2])), {})
        elif timed := re.match(line, text):
            times[parse(timed)] = float(timed[1])
    return found


def _float8() -> Times:
    def parse(found: re.Match[str]) -> Config:
        fields = {name: json.loads(value.lower()) for name, value in re.findall(r"(\w+)=(\w+)", found[3])}
        return (TileConfig if found[2] == "Tile" else VectorConfig)(**fields)

    line = rf"\s+{FLOAT} us .* (Tile|Vector)Config\((.*)\)"
    return _times("trial_fp8.txt", r"(\w+:\d+x\d+):fp8 (\d+) library", line, parse, FP8)


def _words() -> Times:
    def parse(found: re.Match[str]) -> Config:
        return TileConfig(*map(int, re.findall(r"[a-z] (\d+)", found[2])))

    return _times("trial_words.txt", r"(\w+:\d+x\d+) (\d+) floor", rf"\s+{FLOAT} us .*(rows .*)", parse, INT4)


def test_estimates_are_near_what_was_measured() -> None:
    """Off by less than 12% in the mean. Of the launch shapes that were timed, the favourite is within 5% of the fastest
    at four of five products and numbers of tokens."""
    costs, ratios, picks = QuantizedCosts(H200), [], []
    for kind, measured in ((FP8, _float8()), (INT4, _words())):
        for (product, tokens), times in measured.items():
            known = {config: us for config in times if (us := costs.own(product, tokens, kind, config)) is not None}
            ratios += [us / times[config] for config, us in known.items()]
            if known:
                favourite = min(known, key=lambda config: known[config])
                picks.append(times[favourite] / min(times[config] for config in known))
    assert len(ratios) > 90
    assert len(picks) > 30
    assert statistics.mean(abs(ratio - 1) for ratio in ratios) < 0.12
    assert sum(pick <= 1.05 for pick in picks) >= 0.8 * len(picks)
    assert max(picks) < 1.3


@pytest.mark.parametrize("kind", COMPILED, ids=lambda kind: kind.name)
def test_what_is_ranked_can_be_launched(kind: Kind) -> None:
    """Of every bucket there are some, in the order of their times."""
    costs = QuantizedCosts(H200)
    for form, rows, inputs in (("plain", 6144, 4096), ("partial", 4096, 14336), ("gated", 28672, 4096)):
        for tokens in BUCKETS:
            ranked = costs.ranked(Product(form, rows, inputs, kind.name), tokens, kind, 99)
            assert ranked
            assert [us for us, _ in ranked] == sorted(us for us, _ in ranked)
            for us, config in ranked:
                assert 0 < us < 1e5
                assert is_legal(Product(form, rows, inputs, kind.name), tokens, config)


def test_other_gpus_have_no_estimates() -> None:
    """Nothing was compiled for them, so that the rules decide."""
    product = Product("plain", 6144, 4096, INT4.name)
    assert QuantizedCosts(A100).ranked(product, 8, INT4, 9) == []
    assert choose_quantized("plain", 8, 6144, 4096, INT4, torch.bfloat16, A100).source is Source.RULE


def test_the_rule_gives_way_to_what_should_be_clearly_faster() -> None:
    """Here K of a down projection that was never timed is cut, and the reason has both estimates."""
    kind = Kind(Code.WORDS, 1, 128)
    found = [
        choice
        for tokens in BUCKETS
        for rows, inputs in ((3584, 18944), (5120, 27648))
        if (choice := choose_quantized("partial", tokens, rows, inputs, kind, torch.bfloat16, H200)).source
        is Source.MODEL
    ]
    assert found
    for choice in found:
        reason = re.search(rf"take {FLOAT} µs, the rule's {FLOAT}", choice.why)
        assert reason
        ours, rules = map(float, reason.groups())
        assert ours < MARGIN * rules + 0.1


def test_what_was_measured_comes_first() -> None:
    """The shipped table has the trials' fastest, by product and layout."""
    found = choose_quantized("partial", 8, 4096, 14336, INT4, torch.bfloat16, H200)
    assert found.source is Source.MEASURED
    assert found.config == TileConfig(16, 8, 512, 3, 4, 4)
    assert choose_quantized("plain", 8, 6144, 4096, FP8, torch.float16, H200).source is not Source.MEASURED


@pytest.mark.parametrize(
    "kind",
    [*COMPILED, Kind(Code.E4M3), Kind(Code.E2M1, 1, 16), Kind(Code.TABLE, 1, 64), Kind(Code.INT8, 1, 16, lows=True),
     Kind(Code.INT8, zeros=True), Kind(Code.WORDS, 1, 32, lows=True)],
    ids=lambda kind: kind.name,
)  # fmt: skip
def test_random_layouts_are_of_their_kind(kind: Kind) -> None:
    """Finite, and read by the kernels; and a kind is known by its name."""
    layout = random_layout(kind, 256, 512, torch.device("cpu"))
    assert kind_of(layout) == kind
    assert coded_of(layout) is not None
    assert bool(layout.dense().isfinite().all())
    assert Kind.parse(kind.name) == kind


@pytest.mark.parametrize("name", ["other", "fp8-", "fp8-rounded-zeros", "int5", ""])
def test_other_names_are_no_kinds(name: str) -> None:
    with pytest.raises(ValueError, match="no layout"):
        Kind.parse(name)


class _Fake(Timer):
    """The last launch shape of a list takes half of the time of the others."""

    def times(self, product: Product, bucket: int, configs: object) -> dict[Config | None, float]:
        found: dict[Config | None, float] = dict.fromkeys(configs, 10.0)  # type: ignore[call-overload]
        found[list(found)[-1]] = 5.0
        return found


class _NoCompilers(Compilers):
    def __init__(self) -> None:
        self.names: list[str] = []

    def compile(self, jobs: object) -> Iterator[str]:
        self.names += [job.name for job in jobs]  # type: ignore[attr-defined]
        yield from ()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    read_user_tables(None)


def test_tuning_changes_what_is_chosen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layout's best few, the fastest is what a start chooses from then on."""
    monkeypatch.setattr(pagebus.kernels.linear.tuning.tune, "ORDER", (8,))
    product, compilers = Product("plain", 6144, 4096, INT4.name), _NoCompilers()
    (found,) = tune([product], H200, folder, 1.0, print, compilers, timer=_Fake(print), sort_of=sort_of)
    assert found.changed
    assert found.after <= GAIN * found.before
    assert len(compilers.names) == len(set(compilers.names)) == 6
    choice = choose_quantized("plain", 8, 6144, 4096, INT4, torch.bfloat16, H200)
    assert (choice.config, choice.source) == (found.config, Source.USER)


def test_a_sample_compiles_as_the_table_says() -> None:
    """Every launch shape was compiled; shared memory is the same, and spills are none where the table has none."""
    pytest.importorskip("triton")
    known, todo = resources(90), list(variants())
    assert set(todo) == known.keys()
    assert (FOLDER / "sm_90.json").is_file()
    done = run(["-m", "tests.kernels.quantized.compile_shapes", "--sample", "31/79"])
    assert done.returncode == 0, done.stderr[-3000:]
    for index, _, spilled, shared in map(json.loads, done.stdout.splitlines()):
        assert shared == known[todo[index]].shared
        assert bool(spilled) == bool(known[todo[index]].spilled)
