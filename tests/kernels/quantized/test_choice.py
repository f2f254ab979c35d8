"""What multiplies by quantized weights, by tokens and layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.coded.weights import Code
from pagebus.kernels.coded.word_tiles import FEW_TOKENS
from pagebus.kernels.common.target import Target
from pagebus.kernels.common.user_tables import read_user_tables, user_path
from pagebus.kernels.linear.activation import activation_mul_reference
from pagebus.kernels.linear.dispatch import Source
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.shapes import BUCKETS, FORMS, WIDE_BUCKETS, LinearKernel, Product, is_legal
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.tables import merge_table
from pagebus.kernels.quantized.choice import (
    choose_quantized,
    choose_quantized_invariant,
    choose_quantized_residual,
    invariant_config,
)
from pagebus.kernels.quantized.coding import Kind, kind_of
from pagebus.kernels.quantized.library import fits_scratch
from pagebus.kernels.quantized.products import gated_linear, linear, linear_invariant, partial_linear
from pagebus.kernels.quantized.word_choice import few_config, widening_config, word_config
from pagebus.kernels.specialized.hopper_few import FewConfig
from pagebus.kernels.specialized.hopper_words import WideningConfig
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS

BF16 = torch.bfloat16
H200, L4, A100 = Target(90, 132), Target(89, 58), Target(80, 108)
FP8, INT8 = Kind(Code.E4M3, rounded=True), Kind(Code.INT8, rounded=True)
BLOCKS = Kind(Code.E4M3, 128, 128, rounded=True)
KINDS = (
    FP8, Kind(Code.E4M3, 128, 128), Kind(Code.INT8, 1, 128, zeros=True), Kind(Code.E4M3, 1, 32), Kind(Code.WORDS),
    Kind(Code.WORDS, 1, 128, zeros=True), Kind(Code.INT8, 1, 16, lows=True), Kind(Code.E2M1, 1, 32),
    Kind(Code.TABLE, 1, 64), Kind(Code.WORDS, 1, 32),
)  # fmt: skip
ZEROS = Kind(Code.WORDS, 1, 128, zeros=True)
MANY = 5000
WIDENING_TIMES = Path(__file__).parents[3] / "docs/measurements/h200-quantized/words-one-ring.txt"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("target", [H200, L4, A100], ids=str)
def test_every_bucket_has_a_launch_shape(kind: Kind, target: Target) -> None:
    """That computes the product: K is cut where sums are added up, and blocks are whole numbers of tiles."""
    weights_only = kind._replace(rounded=False)
    for form in FORMS:
        for rows, inputs in ((4096, 14336), (28672, 4096), (70, 200)):
            for tokens in BUCKETS:
                found = choose_quantized(form, tokens, rows, inputs, weights_only, BF16, target, half_normed=True)
                config = found.config
                assert config is not None
                assert is_legal(Product(form, rows, inputs, kind.name), tokens, config)
                if isinstance(config, TileConfig):
                    whole = kind.width % config.depth == 0 or (kind.width, config.depth) == (16, 32)
                    assert config.depth % 128 == 0 if kind.code.in_words else whole


@pytest.mark.parametrize(
    ("product", "tokens", "shape"),
    [
        ("gated:28672x4096", 8, (32, 8, 512, 1)), ("plain:6144x4096", 1, (16, 8, 1024, 1)),
        ("partial:4096x14336", 8, (16, 8, 512, 4)), ("partial:4096x4096", 16, (16, 16, 512, 2)),
        ("residual:4096x14336", 8, (32, 8, 512, 4)), ("plain:4096x1024", 8, (16, 8, 256, 1)),
        ("gated:28672x4096", 32, (128, 32, 128, 1)), ("partial:4096x4096", 32, (128, 32, 128, 4)),
        ("plain:6144x4096", 32, (32, 16, 512, 1)), ("plain:6144x4096", 64, (32, 32, 512, 1)),
        ("gated:28672x4096", 256, (128, 128, 128, 1)), ("partial:4096x14336", 256, (128, 128, 128, 2)),
    ],
)  # fmt: skip
def test_words_have_the_measured_launch_shapes(product: str, tokens: int, shape: tuple[int, ...]) -> None:
    """Rows, tokens, depth and splits: deep steps where tokens are few, K in parts where programs are."""
    config = word_config(Product.parse(product), tokens, ZEROS, H200)
    assert (config.rows, config.tokens, config.depth, config.splits) == shape


@pytest.mark.parametrize(
    ("product", "tokens", "shape"),
    [
        ("gated:28672x4096", 64, (64, 1)), ("gated:28672x4096", 256, (256, 1)), ("plain:6144x4096", 64, (64, 4)),
        ("plain:6144x4096", 128, (128, 2)), ("plain:6144x4096", 256, (128, 1)),
        ("partial:4096x4096", 128, (128, 4)), ("partial:4096x14336", 256, (256, 4)),
        ("residual:4096x14336", 128, None), ("gated:28672x4096", 32, None), ("plain:1024x4096", 256, None),
        ("gated:28672x4160", 256, None),
    ],
)  # fmt: skip
def test_words_are_widened_for_many_tokens(product: str, tokens: int, shape: tuple[int, int] | None) -> None:
    """By some warps for others, in tiles of so many tokens and parts of K, as was fastest: where these are enough."""
    config = widening_config(Product.parse(product), tokens, ZEROS, H200)
    assert (config and (config.tokens, config.splits)) == shape
    assert config is None or is_legal(Product.parse(f"{product}:{ZEROS.name}"), tokens, config)


def _measured_times() -> Iterator[tuple[Product, int, dict[str, float]]]:
    """Product, tokens, and microseconds of each launch shape (``128x256 1``: rows, tokens and splits) and of the tiles
    that would be chosen else."""
    for line in WIDENING_TIMES.read_text().splitlines():
        if found := re.match(r"(\S+:\S+) (\d+) chosen [^|]+ \| (.*) \|", line):
            times: dict[str, float] = {}
            for name, us in re.findall(r"(\d+x\d+ \d+(?= q2)|chosen tiles)(?: q2)?: ([\d.]+)", found[3]):
                times[name] = float(us)
            yield Product.parse(found[1]), int(found[2]), times


def test_words_are_widened_where_that_was_fastest() -> None:
    """Of all that was timed on an H200 the fastest is chosen, or what took 6% longer; the tables have it for 32
    tokens."""
    measured = list(_measured_times())
    assert len(measured) == 16
    for product, tokens, times in measured:
        kind = ZEROS if tokens == 32 else ZEROS._replace(zeros=False)  # which tables do not have
        config = choose_quantized(product.form, tokens, product.rows, product.inputs, kind, BF16, H200).config
        chosen = "chosen tiles"
        if isinstance(config, WideningConfig):
            chosen = f"{config.rows}x{config.tokens} {config.splits}"
        assert times[chosen] <= 1.06 * min(times.values()), (product.name, tokens)


def test_few_tokens_of_words_come_through_a_ring() -> None:
    """On Hopper, of what the kernel reads, as long as its registers have room; one token may take several passes."""

    def found(form: str, tokens: int, rows: int, inputs: int, kind: Kind = ZEROS, target: Target = H200) -> object:
        return few_config(Product(form, rows, inputs), tokens, kind, target)

    for kind in (ZEROS, ZEROS._replace(zeros=False)):
        assert found("plain", 1, 6144, 4096, kind) == found("gated", 8, 28672, 4096, kind) == FewConfig(8, 4)
        assert found("plain", 16, 6144, 4096, kind) == FewConfig(16, 4)
        assert found("gated", 8, 57344, 8192, kind) == FewConfig(8, 8)
        assert found("residual", 1, 4096, 14336, kind) == FewConfig(8, 7, 2)
    assert found("residual", 2, 4096, 14336) == found("plain", 16, 10240, 8192) is None
    assert found("plain", 17, 6144, 4096) is None
    assert found("residual", 1, 65536, 14336) is None  # too many sums to hold
    assert found("plain", 1, 6144, 4096, target=A100) == found("plain", 1, 6144, 4000) is None
    assert found("plain", 1, 6152, 4096) == found("gated", 1, 6160, 4096) is None
    for kind in (Kind(Code.WORDS, 1, 32), Kind(Code.WORDS, 1, 128, lows=True), Kind(Code.E2M1, 1, 32), FP8):
        assert found("plain", 1, 6144, 4096, kind) is None
    half = choose_quantized("gated", 1, 28672, 4096, ZEROS, BF16, H200, half_normed=True)
    assert half.kernel == LinearKernel.HOPPER_FEW
    assert choose_quantized_residual(1, 4096, 14336, ZEROS, BF16, H200).config == FewConfig(8, 7, 2)


def test_many_words_are_widened_up_to_a_thousand_tokens() -> None:
    """Where that is faster than to dequantize them; and never where other kernels would be asked."""

    def found(form: str, tokens: int, rows: int, target: Target = H200, kind: Kind = ZEROS) -> LinearKernel:
        return choose_quantized(form, tokens, rows, 4096, kind, BF16, target).kernel

    for tokens in WIDE_BUCKETS:
        assert found("gated", tokens, 28672) == found("partial", tokens, 4096) == LinearKernel.HOPPER_WORDS
        assert found("gated", tokens, 28672, A100) == LinearKernel.DEQUANTIZED
        assert found("gated", tokens, 28672, kind=Kind(Code.E2M1, 1, 32)) == LinearKernel.DEQUANTIZED
        assert found("plain", tokens, 1024) == LinearKernel.DEQUANTIZED  # few tiles
        assert found("gated", tokens, 28672, kind=FP8) == LinearKernel.SCALED_MM
    assert found("plain", 1024, 6144) == LinearKernel.DEQUANTIZED
    assert found("gated", 4096, 28672) == LinearKernel.HOPPER_PROMPTS
    assert choose_quantized_residual(512, 4096, 4096, ZEROS, BF16, H200).form == "partial"
    assert choose_quantized_residual(1024, 4096, 4096, ZEROS, BF16, H200).form == "plain"


def test_prompts_of_dequantized_words_take_the_kernel_of_dense_ones() -> None:
    """Where tables have that for dense weights, and the scratch is large enough."""

    def kernel(form: str, rows: int, kind: Kind, dtype: torch.dtype = BF16, target: Target = H200) -> LinearKernel:
        return choose_quantized(form, MANY, rows, 3584, kind, dtype, target).kernel

    for kind, dtype in ((ZEROS, BF16), (Kind(Code.E2M1, 1, 32), BF16), (ZEROS, torch.float16), (FP8, torch.float16)):
        assert kernel("gated", 28672, kind, dtype) == LinearKernel.HOPPER_PROMPTS
        assert kernel("plain", 28672, kind, dtype) == LinearKernel.DEQUANTIZED
        assert kernel("gated", 28688, kind, dtype) == LinearKernel.DEQUANTIZED
        assert kernel("gated", 28672, kind, torch.float32) == LinearKernel.DEQUANTIZED
    assert kernel("gated", 28672, ZEROS, target=A100) == LinearKernel.DEQUANTIZED
    assert kernel("gated", 28672, FP8) == LinearKernel.SCALED_MM  # which tokens are rounded for
    assert kernel("gated", 28672, INT8) == LinearKernel.INT_MM
    assert kernel("gated", 28672, BLOCKS) == LinearKernel.DEQUANTIZED
    assert fits_scratch(Product("gated", 28672, 4096))
    assert not fits_scratch(Product("gated", 57344, 8192))


def test_what_is_not_widened() -> None:
    """Other GPUs, offsets, zeros of groups within a tile, codes that are no numbers; nor what completes a norm."""
    product = Product("gated", 28672, 4096)
    assert widening_config(product, 256, ZEROS, A100) is None
    plain = ZEROS._replace(zeros=False)
    for other in (ZEROS._replace(lows=True), ZEROS._replace(width=32), *(plain._replace(width=w) for w in (16, 48))):
        assert widening_config(product, 256, other, H200) is None
    assert widening_config(product, 256, ZEROS._replace(code=Code.E2M1), H200) is None
    assert all(widening_config(product, 256, plain._replace(width=width), H200) for width in (0, 32, 64, 256))
    odd = [product._replace(rows=rows) for rows in (28688, 28704)]  # whose gates begin at multiples of 8 and 16 bytes
    assert [widening_config(each, 256, ZEROS, H200) is None for each in odd] == [True, False]
    assert widening_config(odd[0], 256, plain, H200)
    found = choose_quantized("gated", 256, 28672, 4096, ZEROS, BF16, H200, half_normed=True)
    assert isinstance(found.config, TileConfig)


def test_offsets_have_no_deep_steps() -> None:
    lows = Kind(Code.WORDS, 1, 32, zeros=True, lows=True)
    for form, tokens in ((form, tokens) for form in FORMS for tokens in BUCKETS):
        for target in (H200, L4, A100):
            assert word_config(Product(form, 6144, 4096), tokens, lows, target).depth == 128


def test_many_tokens_are_the_librarys() -> None:
    """Of activations that may be rounded to float8 from 65 tokens on, where Hopper has no tiles for so few; all others
    are dequantized above 256. The library's int8 is slow on Hopper."""

    def kernel(
        tokens: int, kind: Kind | None, target: Target | None = H200, rows: int = 4096, form: str = "plain"
    ) -> LinearKernel:
        return choose_quantized(form, tokens, rows, 4096, kind, BF16, target).kernel

    for kind, library in ((FP8, LinearKernel.SCALED_MM), (INT8, LinearKernel.INT_MM)):
        assert kernel(64, kind) == kernel(64, kind, form="gated") == LinearKernel.SKINNY_GEMM
        assert kernel(128, kind, form="partial") == LinearKernel.SKINNY_GEMM
        assert kernel(65, kind, L4) == kernel(65, kind, L4, form="partial") == kernel(MANY, kind) == library
    assert kernel(65, FP8) == LinearKernel.SKINNY_GEMM
    assert kernel(65, FP8, form="gated") == kernel(256, FP8, rows=10240) == LinearKernel.SCALED_MM
    assert kernel(257, FP8, form="partial") == LinearKernel.SCALED_MM
    for form in ("plain", "gated", "partial"):
        assert kernel(256, INT8, form=form) == LinearKernel.SKINNY_GEMM
        assert kernel(257, INT8, form=form) == LinearKernel.INT_MM
    assert kernel(MANY, INT8, A100) == LinearKernel.INT_MM
    assert kernel(MANY, FP8, A100) == LinearKernel.DEQUANTIZED  # which has no float8
    assert kernel(MANY, FP8, rows=4090) == LinearKernel.DEQUANTIZED
    assert kernel(MANY, FP8._replace(rounded=False)) == LinearKernel.DEQUANTIZED
    assert kernel(256, ZEROS, A100) == LinearKernel.SKINNY_GEMM
    assert kernel(256, ZEROS, rows=1024) == LinearKernel.DEQUANTIZED  # few tiles
    assert kernel(256, ZEROS) == kernel(256, ZEROS, rows=28672) == LinearKernel.HOPPER_WORDS
    assert kernel(1, None) == LinearKernel.DEQUANTIZED
    assert kernel(1, FP8, None) == LinearKernel.TORCH


def _rounds(
    tokens: int, kind: Kind, target: Target = H200, form: str = "plain", rows: int = 6144, dtype: torch.dtype = BF16
) -> bool:
    found = choose_quantized(form, tokens, rows, 4096, kind, dtype, target)
    assert found.config is not None
    return isinstance(found.config, TileConfig) and found.config.rounded


def test_few_tokens_are_rounded_where_many_are() -> None:
    """But not one: it is as fast without."""
    for kind in (FP8, INT8):
        for form in FORMS:
            assert not _rounds(1, kind, form=form)
            for tokens in (2, 16, 32, 64):
                assert _rounds(tokens, kind, form=form) == (form != "wide")
                assert _rounds(tokens, kind, L4, form=form) == (form != "wide")
        assert not _rounds(8, kind._replace(rounded=False))
        assert not _rounds(8, kind, rows=6150)
    assert _rounds(8, INT8, A100)
    assert not _rounds(8, FP8, A100)
    assert not _rounds(8, FP8, dtype=torch.float16)  # whose many tokens are not
    assert not _rounds(8, KINDS[5])


def test_blocks_round_several_tokens() -> None:
    """Up to 256 on Hopper, in steps of a block; other GPUs up to 64, and those without float8 none."""
    for form in ("plain", "gated", "partial", "residual"):
        assert not _rounds(1, BLOCKS, form=form)
        for tokens in (2, 16, 32, 64):
            assert _rounds(tokens, BLOCKS, form=form)
            assert _rounds(tokens, BLOCKS, L4, form=form)
            assert not _rounds(tokens, BLOCKS, A100, form=form)
            assert not _rounds(tokens, BLOCKS._replace(rounded=False), form=form)
        assert _rounds(256, BLOCKS, form=form)
        assert not _rounds(65, BLOCKS, L4, form=form)
    assert not _rounds(8, BLOCKS, form="wide")
    assert not _rounds(8, BLOCKS, dtype=torch.float16)
    found = choose_quantized("plain", MANY, 6144, 4096, BLOCKS, BF16, H200)
    assert (found.kernel, found.why) == (LinearKernel.DEQUANTIZED, "activations stay as they are")


@pytest.mark.parametrize("target", [H200, L4, A100], ids=str)
@pytest.mark.parametrize("kind", [FP8, INT8, BLOCKS], ids=lambda kind: kind.name)
def test_rounded_tiles_can_be_launched(kind: Kind, target: Target) -> None:
    """K is cut where sums are added up, and for as many programs as the GPU holds at once."""
    for form in FORMS:
        for rows, inputs in ((4096, 14336), (3072, 2048), (28672, 4096), (2048, 208)):
            for tokens in BUCKETS:
                config = choose_quantized(form, tokens, rows, inputs, kind, BF16, target).config
                if config is None:
                    continue
                assert is_legal(Product(form, rows, inputs, kind.name), tokens, config)
                assert isinstance(config, VectorConfig) or not kind.width or config.depth == kind.width
                if isinstance(config, TileConfig) and config.rounded and config.splits > 1:
                    assert config.tiles(rows) * config.splits <= 2 * target.num_multiprocessors
                    assert inputs // config.splits >= 1024


def test_products_of_few_rows_are_cut() -> None:
    """Into more parts for few tokens: sums of many take time to be added up."""
    splits = [
        config.splits
        for tokens in (8, 32, 64)
        if isinstance(config := choose_quantized("partial", tokens, 4096, 14336, FP8, BF16, H200).config, TileConfig)
    ]
    assert splits == [4, 2, 2]


def test_other_number_formats_are_dequantized() -> None:
    """Float32 exactly; float16 has no float8 products of the library."""
    for tokens in (1, MANY):
        found = choose_quantized("plain", tokens, 4096, 4096, FP8, torch.float32, H200)
        assert found.kernel == LinearKernel.DEQUANTIZED
    assert choose_quantized("plain", MANY, 4096, 4096, FP8, torch.float16, H200).kernel == LinearKernel.DEQUANTIZED


def test_products_into_the_residual() -> None:
    """Few tokens do half of the norm; others leave sums, or with a bias none; and what follows completes a norm."""
    found = choose_quantized_residual(8, 4096, 14336, FP8, BF16, H200)
    assert found.form == "residual"
    assert choose_quantized_residual(8, 4096, 14336, FP8, BF16, H200, norms=False).form == "partial"
    assert choose_quantized_residual(32, 4096, 14336, FP8, BF16, H200).form == "partial"
    assert choose_quantized_residual(32, 4096, 14336, FP8, BF16, H200, biased=True).form == "plain"
    assert choose_quantized_residual(MANY, 4096, 14336, FP8, BF16, H200).form == "plain"
    assert choose_quantized("gated", 200, 28672, 4096, FP8, BF16, H200, half_normed=True).config is not None


def test_deterministic_is_the_same_for_any_number_of_tokens() -> None:
    """But for the width of the tiles of tokens."""
    for kind in KINDS:
        all_but_tokens = {
            (config.rows, config.depth, config.warps, config.splits, config.tma)
            for config in (invariant_config(tokens, kind) for tokens in (1, 16, 17, 64, 300, 5000))
        }
        assert len(all_but_tokens) == 1
        if kind.code.in_words:  # with more tokens, zeros are taken off in another order
            assert all(invariant_config(tokens, kind).tokens <= FEW_TOKENS.value for tokens in (1, 17, 64, 5000))
    found = choose_quantized_invariant("plain", MANY, FP8, BF16, H200)
    assert found.kernel == LinearKernel.SKINNY_GEMM
    assert choose_quantized_invariant("plain", 1, None, BF16, H200).kernel == LinearKernel.DEQUANTIZED


def test_a_users_table_comes_first(tmp_path: Path) -> None:
    """By the layout's name; None is the library."""
    config = TileConfig(64, 16, 128, 6, 4)
    product = Product("plain", 4096, 4096, "fp8-rounded")
    merge_table(user_path(H200, tmp_path), product, {8: config, 16: None})
    read_user_tables(tmp_path)
    try:
        for tokens, wanted, kernel in ((8, config, LinearKernel.SKINNY_GEMM), (16, None, LinearKernel.SCALED_MM)):
            found = choose_quantized("plain", tokens, 4096, 4096, FP8, BF16, H200)
            assert (found.config, found.kernel, found.source) == (wanted, kernel, Source.USER)
        other = choose_quantized("plain", 8, 4096, 4096, KINDS[1], BF16, H200)
        assert other.source == Source.RULE
    finally:
        read_user_tables(None)


def test_kinds_of_layouts() -> None:
    """Names tell launch shapes apart; what no kernel reads has no kind."""
    cpu = torch.device("cpu")
    names = {name: kind_of(make(64, 256, cpu)) for name, make in LAYOUTS.items()}
    assert {kind.name for kind in names.values() if kind is not None} == {
        "fp8", "int8", "fp8-128x128", "fp8-1x32", "int8-1x128-zeros", "int8-zeros", "int8-1x128", "int4",
        "int4-1x128", "int4-1x128-zeros", "int4-1x64-zeros", "int4-1x32", "int4-1x96-zeros", "int4-1x32-zeros-lows",
        "int8-1x16-lows", "fp4-1x32", "fp4-1x16", "table4-1x64",
    }  # fmt: skip
    assert None not in names.values()
    assert [kind_of(make(64, 256, cpu)) for make in OTHERS.values()] == [None] * len(OTHERS)
    assert Product.parse("plain:64x32:int4-1x128-zeros").name == "plain:64x32:int4-1x128-zeros"


@pytest.mark.parametrize("name", ["fp8 rows", "int4 groups of 128, ordered", "int8 groups of 128, ordered", "nvfp4"])
def test_without_a_gpu_products_are_those_of_the_dense_weight(name: str) -> None:
    """Also of columns in an order of their own."""
    layout = (LAYOUTS | OTHERS)[name](32, 256, torch.device("cpu"))
    x, dense = torch.randn(3, 256), layout.dense()
    expected = F.linear(x, dense)
    for call in (linear, linear_invariant, partial_linear):
        assert torch.allclose(call(x, layout), expected, rtol=1e-4, atol=1e-4)
    if not torch.cuda.is_available():  # the activation's kernel runs in the interpreter then
        assert torch.allclose(gated_linear(x, layout), activation_mul_reference(expected), rtol=1e-4, atol=1e-3)
