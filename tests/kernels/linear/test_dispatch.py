"""Which kernel a product gets, and the tables that are shipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.candidates import SPECIALIZED_ROWS, parts_tried
from pagebus.kernels.linear.dispatch import (
    Source,
    choose,
    choose_product,
    choose_residual_product,
)
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.library_parts import LibraryConfig
from pagebus.kernels.linear.linear import LAUNCHES
from pagebus.kernels.linear.shapes import (
    BUCKETS,
    FORMS,
    KERNELS,
    PROMPT_BUCKETS,
    PROMPTS,
    LinearKernel,
    Product,
    bucket_of,
    is_legal,
)
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.linear.tables import TABLES, load_table, merge_table, table_path
from pagebus.kernels.linear.tuning.tune import candidates_for
from pagebus.kernels.specialized.hopper_few import FewConfig
from pagebus.kernels.specialized.hopper_gemm import GROUPS, LOADING_REGISTERS, SpecializedConfig
from pagebus.kernels.specialized.hopper_prompts import PromptConfig

SHARED_BYTES = 227 * 1024
H200 = Target(90, 132)
L40S = Target(89, 142)


def test_buckets() -> None:
    """A number of tokens belongs to the smallest bucket that holds it."""
    assert [bucket_of(tokens) for tokens in (1, 2, 3, 8, 9, 33, 65, 97, 256)] == [1, 2, 4, 8, 16, 64, 96, 128, 256]


def test_no_gpu() -> None:
    """On a CPU, for no tokens and for many, the library multiplies."""
    for tokens in (0, 1, 1000):
        assert choose("plain", torch.empty(tokens, 64), torch.empty(32, 64)) is None


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables(path: Path) -> None:
    """Every product has choices for buckets that were timed, and each can be launched."""
    table = load_table(path)
    assert table
    for product, choices in table.items():
        assert product.form in FORMS
        buckets = tuple(bucket for bucket in choices if bucket not in PROMPT_BUCKETS)
        assert set(buckets) <= set(BUCKETS)
        for bucket, config in choices.items():
            assert config is None or is_legal(product, bucket, config)
            if config is not None and not isinstance(config, FewConfig | LibraryConfig):
                assert config.rows <= product.rows
            if isinstance(config, TileConfig):
                loaded = (
                    1 if product.layout else 2
                )  # bytes of a number, at most: that of inputs to words is not counted
                assert (config.rows + config.tokens) * config.depth * config.stages * loaded <= SHARED_BYTES


@pytest.mark.parametrize("rows", SPECIALIZED_ROWS)
def test_specialized_shapes(rows: int) -> None:
    """Pieces make up the rows; stages fit shared memory and K, registers a multiprocessor and what the warps share."""
    config = SpecializedConfig(rows, 2)
    assert sum(config.pieces) == rows
    assert len(config.pieces) <= 3
    assert config.fits(1024)
    assert not config.fits(1024 + 128)
    assert 3 < config.stages(8192) * (rows + 128) * 128 / 2**15 < 7.1
    assert config.stages(256) == 2
    threads = 128 * (GROUPS + 1)
    assert threads * config.launch_registers <= 65536
    assert GROUPS * config.registers + LOADING_REGISTERS <= (GROUPS + 1) * config.launch_registers
    assert config.registers >= rows // 2 + 48


def test_tables_are_merged(tmp_path: Path) -> None:
    """A product's choices are kept as they are and replace only its own."""
    path = tmp_path / "sm_00_1.json"
    first = {1: VectorConfig(8, 512, 4, 2), 16: TileConfig(64, 16, 128, 4, 4, 2, True), 256: None}
    second = {1: None, 16: None, 256: TileConfig(128, 128, 64, 4, 8)}
    assert load_table(path) == {}
    plain, partial = Product("plain", 64, 32), Product("partial", 64, 32)
    merge_table(path, plain, {1: None})
    merge_table(path, partial, second)
    merge_table(path, plain, first)
    merge_table(path, partial, {16: SpecializedConfig(224)})
    second[16] = SpecializedConfig(224)
    assert load_table(path) == {plain: first, partial: second}


def test_every_kernel_and_form_is_reachable() -> None:
    """Each row of the table of kernels is some product's, and our own ones can all be launched. Some kernels are of
    quantized weights alone."""
    table = load_table(table_path(H200))
    products = [product[:3] for product in table if not product.layout]
    quantized = {
        LinearKernel.SCALED_MM, LinearKernel.INT_MM, LinearKernel.DEQUANTIZED, LinearKernel.HOPPER_WORDS,
        LinearKernel.HOPPER_FEW,
    }  # fmt: skip
    chosen = [
        choose_product(form, tokens, rows, inputs, torch.bfloat16, target, half_normed=half)
        for (form, rows, inputs) in products
        for tokens in (*BUCKETS, 257, 2048, PROMPTS)
        for target in (H200, None)
        for half in (False, True)
        if form not in ("partial", "residual")
    ]
    chosen += [
        choose_residual_product(tokens, rows, inputs, torch.bfloat16, H200, biased=biased, norms=norms)
        for form, rows, inputs in products
        for tokens in (*BUCKETS, 257)
        for biased in (False, True)
        for norms in (False, True)
        if form == "partial"
    ]
    assert {choice.kernel for choice in chosen} == set(LinearKernel) - quantized
    assert set(LinearKernel) - quantized == {*LAUNCHES, LinearKernel.CUBLAS, LinearKernel.TORCH} - quantized
    assert {choice.form for choice in chosen} == {*FORMS, "added"}
    assert set(KERNELS.values()) == set(LAUNCHES)
    assert all(choice.why for choice in chosen)
    assert {choice.source for choice in chosen} == {Source.MEASURED, Source.MODEL, Source.RULE}


def test_prompts() -> None:
    """A gated product of 4,096 tokens or more takes what was measured, and of 8,192 ours also where nothing was. All
    others take the library, and so does every product in float32, between the buckets, and on an unmeasured GPU."""
    words, bf16 = (28672, 3584), torch.bfloat16
    chosen = choose_product("gated", 8192, *words, bf16, H200)
    assert (chosen.kernel, chosen.source) == (LinearKernel.HOPPER_PROMPTS, Source.MEASURED)
    assert chosen == choose_product("gated", PROMPTS, *words, bf16, H200)
    assert choose_product("gated", PROMPTS, *words, torch.float16, H200).kernel is LinearKernel.HOPPER_PROMPTS
    for others in (
        ("plain", PROMPTS, *words, bf16, H200), ("gated", PROMPTS - 1, *words, bf16, H200),
        ("gated", PROMPTS, 28672, 3648, bf16, H200), ("gated", PROMPTS, *words, torch.float32, H200),
        ("gated", PROMPTS, *words, bf16, Target(90, 114)),
    ):  # fmt: skip
        assert choose_product(*others).kernel is LinearKernel.CUBLAS
    unknown = choose_product("gated", 8192, 28672, 3648, bf16, H200)
    assert (unknown.kernel, unknown.source) == (LinearKernel.HOPPER_PROMPTS, Source.RULE)
    for others in (
        ("gated", 8191, 28672, 3648, bf16, H200), ("gated", 8192, 28672, 3600, bf16, H200),
        ("gated", 8192, 8192, 3648, bf16, H200), ("gated", 8192, 28672, 3648, bf16, Target(90, 114)),
        ("gated", 8192, 28672, 3648, bf16, Target(80, 108)), ("gated", 8192, 28672, 3648, torch.float32, H200),
    ):  # fmt: skip
        assert choose_product(*others).kernel is LinearKernel.CUBLAS
    rank = 14336, 4096
    assert choose_product("gated", 8191, *rank, bf16, H200).kernel is LinearKernel.CUBLAS
    assert choose_product("gated", 8192, *rank, bf16, H200).kernel is LinearKernel.HOPPER_PROMPTS
    assert not is_legal(Product("plain", *words), PROMPTS, PromptConfig())
    assert not is_legal(Product("gated", *words), 256, PromptConfig())
    assert not is_legal(Product("gated", 28672, 3600), PROMPTS, PromptConfig())
    layouts = ("fp8-rounded", "int4-1x128", "int8-rounded", "fp8-128x128-rounded")
    legal = [is_legal(Product("gated", *words, layout), PROMPTS, PromptConfig()) for layout in layouts]
    assert legal == [False, True, False, False]
    assert not is_legal(Product("gated", *words), PROMPTS, SpecializedConfig(224))


def test_half_norms_are_completed() -> None:
    """The library cannot: where it was faster our kernel goes on all the same."""
    words = "gated", 128, 6144, 1024, torch.bfloat16, H200
    assert choose_product(*words).kernel is LinearKernel.CUBLAS
    assert choose_product(*words, half_normed=True).kernel is LinearKernel.SKINNY_GEMM


def test_products_for_the_residual() -> None:
    """With a bias no partial sums are left; of many tokens the library adds; a norm is begun in bfloat16 only."""
    half, many = (4096, 4096, torch.bfloat16, H200), 300
    assert choose_residual_product(1, *half).form == "residual"
    assert choose_residual_product(1, 4096, 4096, torch.float16, H200).form != "residual"
    assert choose_residual_product(1, *half, norms=False).form == "partial"
    unsplit = choose_residual_product(1, *half, norms=False, biased=True)
    assert (unsplit.form, unsplit.config.splits) == ("plain", 1)  # type: ignore[union-attr]
    assert choose_residual_product(many, *half).form == "added"
    assert choose_residual_product(many, *half, biased=True).form == "plain"
    assert choose_residual_product(many, 4096, 4096, torch.float32, H200).form == "plain"
    assert choose_residual_product(many, 4096, 4096, torch.bfloat16, None).form == "plain"


@pytest.mark.parametrize(("rows", "inputs"), [(84, 336), (336, 84), (6145, 4096)])
@pytest.mark.parametrize("form", ["plain", "gated", "partial", "residual"])
def test_rows_at_odd_addresses_are_left_to_the_library(form: str, rows: int, inputs: int) -> None:
    """Of weights or of results: our kernels move 16 bytes at a time."""
    for tokens in (1, 8, 64, 256):
        choice = choose_product(form, tokens, rows, inputs, torch.bfloat16, Target(90, 132))
        assert choice.config is None
        assert choice.source == Source.RULE


def test_one_token_has_a_kernel_of_its_own_where_it_was_measured() -> None:
    """Whatever the library is estimated to take."""
    for rows, inputs in ((8192, 3840), (3840, 15360), (5120, 5120)):
        choice = choose_product("plain", 1, rows, inputs, torch.bfloat16, Target(90, 132))
        assert isinstance(choice.config, VectorConfig)


def test_the_library_multiplies_parts() -> None:
    """From 65 to 256 tokens, of few rows and many inputs, on a measured GPU; with a bias the product stays whole."""
    down, bf16 = (3584, 18944), torch.bfloat16
    chosen = choose_residual_product(256, *down, bf16, H200)
    assert (chosen.kernel, chosen.config, chosen.form) == (LinearKernel.CUBLAS_PARTS, LibraryConfig(2), "partial")
    assert chosen.source is Source.RULE
    biased = choose_residual_product(256, *down, bf16, H200, biased=True)
    assert (biased.kernel, biased.config, biased.form) == (LinearKernel.CUBLAS, None, "plain")
    assert choose_residual_product(128, 2048, 8192, bf16, H200).config == LibraryConfig(4)
    assert choose_residual_product(256, 5120, 17920, bf16, H200).source is Source.MEASURED
    for tokens, rows, inputs, dtype, target in (
        (64, *down, bf16, H200), (257, *down, bf16, H200), (256, 5120, 5120, bf16, H200),
        (256, *down, torch.float32, H200), (256, *down, bf16, Target(90, 114)), (256, *down, bf16, Target(80, 108)),
        (256, 3584, 18944 + 64, bf16, H200), (192, 5120, 25600, bf16, H200),
    ):  # fmt: skip
        assert choose_residual_product(tokens, rows, inputs, dtype, target).kernel != LinearKernel.CUBLAS_PARTS


@pytest.mark.parametrize(
    ("rows", "inputs", "height"),
    [(55296, 5120, 224), (22016, 2048, 192), (16384, 3072, 128), (35840, 5120, 144), (4096, 512, 0)],
)
def test_gates_whose_tiles_fill_their_rounds(rows: int, inputs: int, height: int) -> None:
    """They get specialized tiles of 65 to 128 tokens, on GPUs that were measured; other gates and products do not."""
    for tokens in (65, 96, 128):
        chosen = choose_product("gated", tokens, rows, inputs, torch.bfloat16, H200)
        assert (chosen.config == SpecializedConfig(height)) == (height > 0)
        assert (chosen.source is Source.RULE) == (height > 0)
    for form, tokens, target in (("gated", 64, H200), ("gated", 129, H200), ("wide", 128, H200), ("gated", 128, L40S)):
        other = choose_product(form, tokens, rows, inputs, torch.bfloat16, target)
        assert other.config != SpecializedConfig(height)
        assert other.source is not Source.RULE


def test_parts_that_are_legal() -> None:
    """Of partial sums, which someone adds up, parts of K; of gated products two of rows; all of weights in 16 bits."""
    partial, gated = Product("partial", 3584, 18944), Product("gated", 28672, 4096)
    assert parts_tried(partial, 256) == [LibraryConfig(2), LibraryConfig(4)]
    assert [config.first for config in parts_tried(gated, 256)] == [12672, 16896, 25344]
    assert parts_tried(partial, 64) == parts_tried(gated, 64) == []
    for form in ("plain", "wide", "residual"):
        assert parts_tried(partial._replace(form=form), 256) == []
    for product in (partial, gated):
        assert parts_tried(product._replace(layout="fp8-rounded"), 256) == []
        assert not is_legal(product, 256, LibraryConfig())
        assert not is_legal(product, 8192, parts_tried(product, 256)[0])
        assert set(parts_tried(product, 256)) <= set(candidates_for(product, 256, H200, 1))
    assert not is_legal(gated, 256, LibraryConfig(first=12672 + 64))
    assert not is_legal(gated, 256, LibraryConfig(2, first=12672))
