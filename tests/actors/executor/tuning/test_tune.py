"""Tuning bucket by bucket: what is tried, what the user's table gets, and when it ends; with steps of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pagebus.actors.executor.tuning.changes import Choices, Measurable, changes
from pagebus.actors.executor.tuning.selection import Comparison
from pagebus.actors.executor.tuning.tables import ModelTables, scratch_tables
from pagebus.actors.executor.tuning.tune import Tools, TunedStep, tune_buckets
from pagebus.kernels.attention.forms.choice import choose_form
from pagebus.kernels.attention.forms.form import DecodeForm, DecodeHeads
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import Tuned, read_user_tables, user_path
from pagebus.kernels.linear.dispatch import Source, choose_product
from pagebus.kernels.linear.shapes import BUCKETS, Config, Product, is_legal
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.tables import load_user_table, merge_table
from pagebus.kernels.moe.choice import choose
from pagebus.kernels.moe.launch.shapes import Shape, buckets

H200 = Target(90, 132, 4917)
PLAIN, DOWN, HALVED = Product("plain", 7168, 5120), Product("partial", 5120, 27648), Product("residual", 5120, 27648)
HEAD, OTHER = Product("wide", 152064, 5120), Product("plain", 64, 64)
EXPERTS = Shape(60, 4, 2048, 1408)
HEADS = DecodeHeads(3, 5, 112, 2)
TODO = Measurable([PLAIN, HEAD, DOWN, HALVED], EXPERTS, HEADS)
FITTED = TileConfig(56, 32, 128, 4, 4)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    read_user_tables(None)


class FakeSteps:
    """A step of ``rows`` that takes a tenth less for each of ``fast`` that is chosen by the tables."""

    def __init__(self, tables: ModelTables, rows: int, fast: Choices) -> None:
        self._tables, self._rows, self._fast = tables, rows, fast

    def key(self, choices: Choices) -> object:
        self._tables.put(self._rows, choices)
        found = []
        for each in (*TODO.products, EXPERTS):
            if isinstance(each, Shape):
                found.append((each, choose(self._rows, each, torch.bfloat16, H200)))
            else:
                given = each.form, self._rows, each.rows, each.inputs, torch.bfloat16, H200
                found.append((each, choose_product(*given).config))  # type: ignore[arg-type]
        return (*found, (HEADS, choose_form(self._rows, HEADS, H200).form))

    def compare(self, before: Choices, after: Choices, *, thoroughly: bool) -> Comparison:
        return Comparison(self._ms(before), self._ms(after), 0.0)

    def _ms(self, choices: Choices) -> float:
        chosen = dict(self.key(choices))  # type: ignore[call-overload]
        return 10.0 * 0.9 ** sum(chosen[each] == config for each, config in self._fast.items())


class FakeCompiler:
    """Keeps what is asked for."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.ahead: list[int] = []
        """At each wait: how many more were begun than had been waited for."""

    def begin(self, rows: int, choices: Sequence[Choices]) -> None:
        self.begun.append((rows, len(choices)))

    def wait(self) -> None:
        self.ahead.append(len(self.begun) - len(self.ahead) - 1)


def tuned(
    folder: Path, fast: Choices, tokens: Sequence[int] = (32, 8), clock: Callable[[], float] = lambda: 0.0
) -> tuple[list[TunedStep], list[str], FakeCompiler]:
    lines: list[str] = []
    compiler = FakeCompiler()
    with scratch_tables(H200, TODO) as tables:
        tools = Tools(lambda rows: FakeSteps(tables, rows, fast), compiler)
        found = tune_buckets(tools, TODO, H200, ModelTables(folder, H200, TODO), lines.append, tokens, 60.0, clock)
    return found, lines, compiler


def chosen(product: Product, tokens: int) -> tuple[Config | None, Source]:
    found = choose_product(product.form, tokens, product.rows, product.inputs, torch.bfloat16, H200)
    return found.config, found.source


def test_what_makes_steps_faster_is_what_a_start_chooses(tmp_path: Path) -> None:
    """Of products and of experts; nothing else gets a row, so that all else is chosen as before."""
    shape = changes(TODO, 32, H200)[0][-1].choices[EXPERTS]
    before = chosen(HEAD, 32), chosen(PLAIN, 64)
    assert chosen(PLAIN, 32)[0] != FITTED
    found, lines, _ = tuned(tmp_path, {PLAIN: FITTED, EXPERTS: shape}, (32,))
    assert found == [TunedStep(32, 10.0, pytest.approx(8.1))]
    assert found[0].changed
    assert any("32 tokens 10.000 → 8.100 ms, 19.0% less" in line for line in lines)
    assert load_user_table(H200, tmp_path) == {PLAIN: {32: FITTED}}
    assert not user_path(H200, tmp_path, Tuned.ATTENTION).exists()
    read_user_tables(tmp_path)
    assert chosen(PLAIN, 32) == chosen(PLAIN, 17) == (FITTED, Source.USER)
    assert choose(32, EXPERTS, torch.bfloat16, H200) == shape
    assert (chosen(HEAD, 32), chosen(PLAIN, 64)) == before


def test_attention_takes_the_form_with_which_steps_are_faster(tmp_path: Path) -> None:
    """In this bucket; an earlier one goes where nothing is faster."""
    form = DecodeForm(apart=True)
    tuned(tmp_path, {HEADS: form}, (32,))
    read_user_tables(tmp_path)
    assert choose_form(32, HEADS, H200) == (form, Source.USER)
    assert choose_form(8, HEADS, H200).source is Source.RULE
    tuned(tmp_path, {}, (32,))
    read_user_tables(tmp_path)
    assert choose_form(32, HEADS, H200).source is Source.RULE


def test_a_product_may_begin_to_do_half_of_the_next_norm(tmp_path: Path) -> None:
    """Or stop to: then both of its forms change at once."""
    tried = next(group for group in changes(TODO, 8, H200) if group[0].name == DOWN.name)
    stops = [each.choices for each in tried if DOWN in each.choices]
    assert all(each[HALVED] is None for each in stops)
    begins = [each.choices[HALVED] for each in tried if DOWN not in each.choices and each.choices[HALVED]]
    halved = next(config for config in begins if config != chosen(HALVED, 8)[0])
    tuned(tmp_path, {HALVED: halved}, (8,))
    assert load_user_table(H200, tmp_path) == {HALVED: {8: halved}}


def test_the_next_steps_are_compiled_while_one_is_timed(tmp_path: Path) -> None:
    """The most telling first; each product's begun once, and waited for before they are timed."""
    found, _, compiler = tuned(tmp_path, {}, (1, 8, 32))
    assert [each.bucket for each in found] == [1, 32, 8]
    assert compiler.begun == [(rows, len(group)) for rows in (1, 32, 8) for group in changes(TODO, rows, H200)]
    assert min(compiler.ahead) == compiler.ahead[-1] == 0
    assert compiler.ahead[0] >= len(changes(TODO, 32, H200))
    assert not any(each.changed for each in found)
    assert not user_path(H200, tmp_path).exists()


def test_rows_of_before_count_no_more(tmp_path: Path) -> None:
    """They are no part of today's choices, and go if nothing is faster without them; other models' rows stay."""
    path = user_path(H200, tmp_path)
    merge_table(path, PLAIN, {32: FITTED, 64: None})
    merge_table(path, OTHER, {32: None})
    tuned(tmp_path, {}, (32,))
    assert load_user_table(H200, tmp_path) == {PLAIN: {64: None}, OTHER: {32: None}}


def test_time_ends(tmp_path: Path) -> None:
    """No bucket begins then, and the table has what was found."""
    table = user_path(H200, tmp_path)
    found, lines, _ = tuned(tmp_path, {PLAIN: FITTED}, (32, 8), lambda: 61.0 if table.exists() else 0.0)
    assert [each.bucket for each in found] == [32]
    assert "time is over: 8 tokens" in lines[-1]


def test_all_that_is_tried_is_legal() -> None:
    """And everything that may be measured is tried, the head after other products, and attention last."""
    for bucket in BUCKETS:
        tried = changes(TODO, bucket, H200)
        names = [group[0].name for group in tried]
        if bucket in buckets(EXPERTS):
            assert names.pop(0) == f"experts {EXPERTS.name}"
        assert names == [DOWN.name, PLAIN.name, HEAD.name, HEADS.name]
        for group in tried[-4:-1]:
            configs = [(each, config) for change in group for each, config in change.choices.items()]
            assert None in dict(configs).values()
            for product, config in configs:
                assert isinstance(product, Product)
                assert config is None or is_legal(product, bucket, config)
