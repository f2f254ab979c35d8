"""Products with quantized experts: layouts, pairs as they come and sorted, all edges, and what is chosen."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.coded.rounding import GROUP, round_tokens
from pagebus.kernels.coded.weights import Code
from pagebus.kernels.common.target import Target
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.moe.activation import Gate, GateKind
from pagebus.kernels.moe.choice import token_counts
from pagebus.kernels.moe.coded import CodedConfig, coded_experts
from pagebus.kernels.moe.launch.shapes import ExpertsKernel, Shape
from pagebus.kernels.quantized import experts
from pagebus.kernels.quantized.coding import Kind, experts_kind_of
from pagebus.kernels.quantized.expert_choice import choose_quantized_experts
from pagebus.kernels.quantized.experts import (
    QuantizedExperts,
    coded_layer,
    moe_experts,
    moe_experts_reference,
)
from pagebus.kernels.quantized.layouts import Layout, W8Blocks, W8Rows
from pagebus.kernels.specialized.hopper_few import FewConfig
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS, stacked

HIDDEN, WIDTH, EXPERTS, TOP_K = 136, 40, 3, 2
"""Neither is a multiple of the tiles, nor of groups."""
LIMIT = 2e-5
CLAMPED = Gate(GateKind.SWIGLU_CLAMPED, 1.3, 0.7)
PAIRS = [
    ("fp8 blocks of 128x128", "mxfp4"), ("int8 rows", "nvfp4"), ("int4 groups of 64, zeros", "int8 groups of 16, lows"),
    ("nf4", "int4 groups of 96"), ("int4 groups of 32, lows", "int8 groups of 128, zeros"),
]  # fmt: skip
"""The layouts of both products, which need not be the same."""
H200, L4, A100 = Target(90, 132), Target(89, 58), Target(80, 108)
QWEN3, GPT_OSS = Shape(128, 8, 2048, 768), Shape(32, 4, 2880, 2880)
BLOCKS, INT8 = Kind(Code.E4M3, 128, 128, rounded=True), Kind(Code.INT8, rounded=True)


def make_layer(gate_up: str, down: str, device: torch.device) -> QuantizedExperts:
    def layout(name: str, rows: int, columns: int) -> Layout:
        return stacked((LAYOUTS | OTHERS)[name], EXPERTS, rows, columns, device)

    biases = (torch.randn(EXPERTS, rows, device=device) for rows in (2 * WIDTH, HIDDEN))
    return QuantizedExperts(layout(gate_up, 2 * WIDTH, HIDDEN), layout(down, HIDDEN, WIDTH), *biases, CLAMPED)


def make_tokens(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a view into wider rows; weights; different experts of each token, and none of the last one."""
    x = torch.randn(count, HIDDEN + 8, device=device)[:, :HIDDEN]
    chosen = torch.rand(count, EXPERTS, device=device).argsort(1)[:, :TOP_K].int().contiguous()
    chosen[-1], x[-1] = -1, torch.nan
    return x, torch.rand(count, TOP_K, device=device), chosen


def config_of(layer: QuantizedExperts, *, ordered: bool) -> CodedConfig:
    kinds = experts_kind_of(layer.gate_up), experts_kind_of(layer.down)
    return CodedConfig(*(TileConfig(64, 16, kind.depth, 2, 4) for kind in kinds if kind is not None), ordered)


def error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((result.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("gate_up", "down", "ordered"), [
    *((*names, index % 2 == 0) for index, names in enumerate(PAIRS)),
    *((*reversed(names), index % 2 == 1) for index, names in enumerate(PAIRS)),
])  # fmt: skip
def test_products_are_those_of_dense_experts(gate_up: str, down: str, ordered: bool, device: torch.device) -> None:
    """With biases and a gate that clamps; tokens without experts get zeros, and nobody else sees them."""
    layer, tokens = make_layer(gate_up, down, device), make_tokens(3, device)
    result = coded_experts(*tokens, coded_layer(layer), config_of(layer, ordered=ordered))
    assert not result[-1].any()
    assert error(result[:-1], moe_experts_reference(*tokens, layer)[:-1]) < LIMIT


@pytest.mark.parametrize("ordered", [True, False])
def test_choices_that_are_elsewhere_are_left_out(ordered: bool, device: torch.device) -> None:
    """A token may have some experts here and others not; both parts add up to the whole."""
    layer, (x, weights, experts) = make_layer("mxfp4", "fp8 blocks of 128x128", device), make_tokens(9, device)
    config, whole = config_of(layer, ordered=ordered), moe_experts_reference(x, weights, experts, layer)
    here = [torch.where(experts == 1, experts, -1), torch.where(experts == 1, -1, experts)]
    parts = [coded_experts(x, weights, some, coded_layer(layer), config) for some in here]
    for some, part in zip(here, parts, strict=True):
        assert error(part, moe_experts_reference(x, weights, some, layer)) < LIMIT
    assert error(parts[0] + parts[1], whole) < LIMIT


def test_a_tokens_bits_are_its_own(device: torch.device) -> None:
    """Whatever stands beside it, sorted or not: all to one expert, so that there is a full item and one more."""
    layer, (x, weights, experts) = make_layer("mxfp4", "fp8 blocks of 128x128", device), make_tokens(18, device)
    x, experts = x.nan_to_num(), experts[:1].expand(18, TOP_K).contiguous()
    whole = coded_experts(x, weights, experts, coded_layer(layer), config_of(layer, ordered=True))
    assert error(whole, moe_experts_reference(x, weights, experts, layer)) < LIMIT
    few = [each[3:5].contiguous() for each in (x, weights, experts)]
    for ordered in (True, False):
        found = coded_experts(*few, coded_layer(layer), config_of(layer, ordered=ordered))
        assert torch.equal(found, whole[3:5])


@pytest.mark.parametrize("gate_up", ["int4 groups of 24", "int8 groups of 128, ordered"])
def test_any_other_layout_is_dequantized(gate_up: str, device: torch.device) -> None:
    """No kernel reads it, or each expert has its columns in an order of its own."""
    layer, tokens = make_layer(gate_up, "fp8 rows", device), make_tokens(2, device)
    assert experts_kind_of(layer.gate_up) is None
    result = moe_experts(*tokens, layer)
    assert error(result[:-1], moe_experts_reference(*tokens, layer)[:-1]) < LIMIT
    assert moe_experts(*(each[:0] for each in tokens), layer).shape == (0, HIDDEN)


def of_rounded(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What a product with ``layout`` sees of x."""
    assert isinstance(layout, W8Rows | W8Blocks)
    values, scale = round_tokens(x, layout.values.dtype, grouped=isinstance(layout, W8Blocks))
    width = GROUP if isinstance(layout, W8Blocks) else x.shape[1]
    return values.float() * scale.repeat_interleave(width, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("ordered", [True, False])
def test_rounded_tokens(ordered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits times 8 bits, the inputs of both products rounded: with scales of groups, and of tokens."""
    layer = make_layer("fp8 blocks of 128x128", "int8 rows", device)
    tokens = tuple(each[:3] for each in make_tokens(4, device))  # all of which have experts
    tile = TileConfig(32, 16, 128, 2, 4, rounded=True)
    result = coded_experts(*tokens, coded_layer(layer), CodedConfig(tile, tile, ordered))
    exact = experts.expert_product
    monkeypatch.setattr(
        experts, "expert_product", lambda x, layout, bias, expert: exact(of_rounded(x, layout), layout, bias, expert)
    )
    wanted = moe_experts_reference(*tokens, layer)
    assert error(result, wanted) < 3e-3  # what differs in the last bit may be rounded to others


def kinds_of(name: str) -> tuple[Kind | None, Kind | None]:
    kind = experts_kind_of((LAYOUTS | OTHERS)[name](64, 256, torch.device("cpu")))
    return kind, kind


def test_what_is_chosen() -> None:
    """Pairs are sorted where those of dense experts are; items of 128 are for GPUs and layouts with registers for them;
    float32 and other layouts are dequantized."""

    def kernel(tokens: int, name: str, target: Target | None = H200, dtype: torch.dtype = torch.bfloat16) -> str:
        return choose_quantized_experts(tokens, QWEN3, kinds_of(name), dtype, target).kernel

    def config(tokens: int, name: str, target: Target) -> CodedConfig:
        found = choose_quantized_experts(tokens, QWEN3, kinds_of(name), torch.bfloat16, target).config
        assert isinstance(found, CodedConfig)
        return found

    assert [config(tokens, "mxfp4", H200).ordered for tokens in (1, 4, 5)] == [False, False, True]
    widths = {
        (target.capability, name): config(8192, name, target).gate_up.tokens
        for target in (H200, L4, A100)
        for name in ("fp8 blocks of 128x128", "mxfp4")
    }
    assert {key for key, width in widths.items() if width == 128} == {(90, "fp8 blocks of 128x128")}
    assert set(widths.values()) == {64, 128}
    assert kernel(8, "nvfp4") == kernel(8, "nf4") == kernel(8, "int4 groups of 32, lows") == ExpertsKernel.CODED
    assert kernel(8, "mxfp4", dtype=torch.float32) == kernel(8, "int4 groups of 24") == ExpertsKernel.DEQUANTIZED
    assert kernel(8, "mxfp4", None) == ExpertsKernel.TORCH


def test_words_of_single_pairs_come_through_a_ring() -> None:
    """On Hopper, integers in groups of 128 and MXFP4 in bfloat16; the two products may differ."""
    mxfp4, groups, narrow = Kind(Code.E2M1, 1, 32), Kind(Code.WORDS, 1, 128, zeros=True), Kind(Code.WORDS, 1, 32)

    def rings(
        *kinds: Kind, shape: Shape = GPT_OSS, dtype: torch.dtype = torch.bfloat16, target: Target = H200
    ) -> list[bool]:
        config = choose_quantized_experts(1, shape, (kinds[0], kinds[-1]), dtype, target).config
        assert isinstance(config, CodedConfig)
        return [isinstance(each, FewConfig) for each in config[:2]]

    assert choose_quantized_experts(1, GPT_OSS, (mxfp4, mxfp4), torch.bfloat16, H200).config == CodedConfig(
        FewConfig(8, 3), FewConfig(8, 3), ordered=False
    )
    assert rings(groups) == rings(groups, dtype=torch.float16) == [True, True]
    assert rings(mxfp4, narrow) == [True, False]
    assert rings(mxfp4, dtype=torch.float16) == rings(mxfp4, target=A100) == [False, False]
    assert rings(mxfp4, shape=Shape(8, 2, 1032, 344)) == [False, False]
    sorted_pairs = choose_quantized_experts(64, GPT_OSS, (mxfp4, mxfp4), torch.bfloat16, H200).config
    assert isinstance(sorted_pairs, CodedConfig)
    assert sorted_pairs.ordered
    assert isinstance(sorted_pairs.gate_up, TileConfig)


def test_sorted_pairs_are_rounded() -> None:
    """Where the checkpoint was made for that and the GPU multiplies such numbers; those that are not sorted never."""

    def rounds(tokens: int, kind: Kind, target: Target = H200, dtype: torch.dtype = torch.bfloat16) -> list[bool]:
        config = choose_quantized_experts(tokens, QWEN3, (kind, INT8), dtype, target).config
        assert isinstance(config, CodedConfig)
        return [each.rounded for each in config[:2]]

    for tokens in (5, 64, 8192):
        assert rounds(tokens, BLOCKS) == rounds(tokens, BLOCKS, L4) == [True, True]
        assert rounds(tokens, BLOCKS, A100) == rounds(tokens, BLOCKS, dtype=torch.float16) == [False, True]
        assert rounds(tokens, BLOCKS._replace(rounded=False)) == [False, True]
    assert rounds(4, BLOCKS) == [False, False]
    found = choose_quantized_experts(64, QWEN3, (BLOCKS, INT8), torch.bfloat16, H200, invariant=True).config
    assert isinstance(found, CodedConfig)
    assert not any(each.rounded for each in found[:2])


@pytest.mark.parametrize("name", ["fp8 blocks of 128x128", "mxfp4"])
def test_a_start_compiles_all(name: str) -> None:
    """Every number of tokens has the kernels of the next one among those with which a start begins."""
    kinds, counts = kinds_of(name), iter(token_counts(QWEN3, 3000, torch.bfloat16, H200))

    def launched(tokens: int) -> list[object]:
        return [
            choose_quantized_experts(tokens, QWEN3, kinds, torch.bfloat16, H200, invariant=invariant).config
            for invariant in (False, True)
        ]

    following = 0
    for tokens in range(1, 3001):
        following = following if following >= tokens else next(counts)
        assert launched(tokens) == launched(following), (tokens, following)
