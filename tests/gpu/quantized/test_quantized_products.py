"""Products with quantized weights against those with the dequantized weight in float32, on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.coded.rounding import RoundedTokens, round_tokens, round_tokens_reference
from pagebus.kernels.layers.norm import HalfNorm, NextNorm, add_rms_norm
from pagebus.kernels.linear.activation import activation_mul, rounded_activation_mul
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import linear as coded_linear
from pagebus.kernels.linear.shapes import LinearKernel
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.coding import coded_of, kind_of
from pagebus.kernels.quantized.dequantize import dequantize, dequantize_reference
from pagebus.kernels.quantized.layouts import Layout, W8Rows
from pagebus.kernels.quantized.library import library_product
from pagebus.kernels.quantized.products import (
    gated_linear,
    gated_linear_invariant,
    linear,
    linear_invariant,
    partial_linear,
    partial_linear_invariant,
    rounding_of,
)
from tests.gpu.errors import worst_row
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS, w4_words, w8_blocks, w8_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA, E4M3 = torch.device("cuda"), torch.float8_e4m3fn
SHAPES = {  # N, K
    "llama8b qkv": (6144, 4096),
    "llama8b gate_up": (28672, 4096),
    "llama8b down": (4096, 14336),
    "gpt-oss qkv": (5120, 2880),
    "odd": (1234, 1000),
}
TOKENS = (1, 2, 7, 16, 31, 64, 100, 200, 256, 300)
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 2e-3, torch.float32: 2e-5}
CASES = [
    *((shape, torch.bfloat16) for shape in SHAPES),
    *((shape, dtype) for shape in ("gpt-oss qkv", "odd") for dtype in (torch.float16, torch.float32)),
]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def whole(product: torch.Tensor | HalfNorm | None) -> torch.Tensor:
    assert isinstance(product, torch.Tensor)
    return product if product.dim() == 2 else product.sum(0)


@pytest.mark.parametrize("name", LAYOUTS | OTHERS)
def test_unpacking_is_exact(name: str) -> None:
    """By each way that numbers become 16 bits: the identity as tokens gives back every weight, bit for bit; and so does
    dequantizing."""
    layout = (LAYOUTS | OTHERS)[name](512, 256, CUDA)
    exact = layout.dense()
    dense = dequantize(layout, torch.empty(512, 256, device=CUDA), 0)
    assert torch.equal(dense, dequantize_reference(layout, torch.empty_like(dense), 0))
    coded = coded_of(layout)
    if coded is None or "ordered" in name:
        return
    kind = kind_of(layout)
    assert kind is not None
    depth, rounded = kind.depth, kind.lows or name == "nf4"
    for dtype in (torch.bfloat16, torch.float16):
        for tokens, config in ((16, TileConfig(64, 16, depth, 3, 2)), (256, TileConfig(64, 64, depth, 3, 4))):
            x = torch.eye(256, dtype=dtype, device=CUDA)[:tokens]
            result = coded_linear(x, coded, None, torch.float32, config=config)
            limit = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6} if rounded else {"rtol": 1e-6, "atol": 0}
            assert torch.allclose(result, exact.t()[:tokens], **limit), (dtype, config)
        if coded.plain:
            for column in (0, 17, 255):
                x = torch.eye(256, dtype=dtype, device=CUDA)[column : column + 1]
                result = coded_linear(x, coded, None, torch.float32, config=VectorConfig(4, 1024, 4))
                assert torch.allclose(result[0], exact[:, column], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
@pytest.mark.parametrize("name", LAYOUTS | OTHERS)
def test_products(name: str, shape: str, dtype: torch.dtype) -> None:
    """Every form and number of tokens, with whatever was chosen for it; activations stay as they are."""
    rows, size = SHAPES[shape]
    layout, limit = (LAYOUTS | OTHERS)[name](rows, size, CUDA), LIMITS[dtype]
    dense, bias = layout.dense(), torch.randn(rows, device=CUDA).to(dtype)
    kind = kind_of(layout)
    if kind is not None and kind.lows:  # kernels round such weights to 16 bits, which changes gates most
        dense = dense.to(dtype).float()
    for tokens in TOKENS:
        x = (torch.randn(tokens, size, device=CUDA) / 2).to(dtype)  # gated products stay within float16
        expected = F.linear(x.float(), dense)
        assert worst_row(linear(x, layout), expected) < limit
        assert worst_row(linear(x, layout, None, torch.float32), expected) < limit
        assert worst_row(linear(x, layout, bias), expected + bias.float()) < limit
        assert worst_row(whole(partial_linear(x, layout)), expected) < limit
        assert worst_row(whole(partial_linear(x, layout, bias)), expected + bias.float()) < limit
        gate, up = expected.chunk(2, dim=1)
        assert worst_row(gated_linear(x, layout), F.silu(gate) * up) < 2 * limit


def rounded_rows(rows: int, size: int, dtype: torch.dtype) -> W8Rows:
    plain = w8_rows(rows, size, dtype, CUDA)
    return W8Rows(plain.values, plain.scale, rounded=True)


@pytest.mark.parametrize("tokens", [2, 8, 16, 32, 64, 65, 128, 256, 300, 5000])
@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_rounded_activations(dtype: torch.dtype, tokens: int) -> None:
    """Products of 8 bits, our own of few tokens and the library's: those of the same rounded activations."""
    layout = rounded_rows(6144, 4096, dtype)
    x, bias = torch.randn(tokens, 4096, device=CUDA).bfloat16(), torch.randn(6144, device=CUDA).bfloat16()
    rounded, scale = round_tokens(x, dtype)
    again, same = round_tokens_reference(x, dtype)
    assert torch.equal(scale, same)
    assert (rounded.float() != again.float()).float().mean() < 1e-3
    expected = F.linear(rounded.float() * scale, layout.dense())
    assert worst_row(linear(x, layout, bias), expected + bias.float()) < 8e-3
    assert worst_row(linear(x, layout), F.linear(x.float(), layout.dense())) < 0.05
    gate, up = expected.chunk(2, dim=1)
    assert worst_row(gated_linear(x, layout), F.silu(gate) * up) < 2e-2
    assert worst_row(whole(partial_linear(x, layout)), expected) < 8e-3


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_norms_and_activations_that_round(dtype: torch.dtype) -> None:
    """In one kernel the same tokens as in two; and a product that reads them the same result."""
    x, residual = torch.randn(2, 700, 4096, device=CUDA), torch.randn(700, 4096, device=CUDA).bfloat16()
    weight, again = torch.rand(4096, device=CUDA).bfloat16(), residual.clone()
    normed = add_rms_norm(x, residual, weight, 1e-5)
    rounded = add_rms_norm(x, again, weight, 1e-5, rounded=dtype)
    gates = torch.randn(700, 2 * 14336, device=CUDA).bfloat16()
    assert torch.equal(residual, again)
    assert isinstance(normed, torch.Tensor)
    assert isinstance(rounded, RoundedTokens)
    for found, exact in (
        (rounded, normed), (rounded_activation_mul(gates, "silu", dtype), activation_mul(gates, "silu")),
    ):  # fmt: skip
        values, scale = round_tokens(exact, dtype)
        assert torch.allclose(found.scale, scale, rtol=1e-2)
        assert worst_row(found.exact, values.float() * scale) < 1e-2
    layout = rounded_rows(6144, 4096, dtype)
    assert rounding_of(normed, layout, "plain") == dtype
    assert worst_row(linear(rounded, layout), linear(normed, layout).float()) < 1e-2


@pytest.mark.parametrize("tokens", [2, 16, 32, 64, 128, 256, 300])
def test_rounded_groups(tokens: int) -> None:
    """Products of blocks of 128 by 128, up to 256 tokens: those of activations whose groups of 128 are rounded."""
    layout = replace(w8_blocks(6144, 4096, E4M3, (128, 128), CUDA), rounded=True)
    x, bias = torch.randn(tokens, 4096, device=CUDA).bfloat16(), torch.randn(6144, device=CUDA).bfloat16()
    rounded, scale = round_tokens_reference(x, E4M3, grouped=True)
    spread = scale.double().repeat_interleave(128, 1)
    expected = F.linear(rounded.double() * spread, layout.dense().double())
    if tokens > 256:  # dequantized
        expected = F.linear(x.double(), layout.dense().double())
    assert worst_row(linear(x, layout, bias), expected + bias.double()) < 1e-2
    gate, up = expected.chunk(2, dim=1)
    assert worst_row(gated_linear(x, layout), F.silu(gate) * up) < 2e-2
    assert worst_row(whole(partial_linear(x, layout)), expected) < 1e-2


@pytest.mark.parametrize("tokens", [257, 384, 512, 700, 1024, 1025])
def test_words_of_many_tokens(tokens: int) -> None:
    """Widened by warps for others, or dequantized for the library: both multiply the weight rounded to 16 bits."""
    layout, x = w4_words(4096, 4096, 128, CUDA, zeros=True), torch.randn(tokens, 4096, device=CUDA).bfloat16()
    expected = F.linear(x.float(), layout.dense())
    assert worst_row(linear(x, layout), expected) < 1e-2
    assert worst_row(whole(partial_linear(x, layout)), expected) < 1e-2
    gate, up = expected.chunk(2, dim=1)
    assert worst_row(gated_linear(x, layout), F.silu(gate) * up) < 2e-2


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_one_token_is_not_rounded(dtype: torch.dtype) -> None:
    layout, x = rounded_rows(6144, 4096, dtype), torch.randn(1, 4096, device=CUDA).bfloat16()
    assert worst_row(linear(x, layout), F.linear(x.float(), layout.dense())) < LIMITS[torch.bfloat16]


def begun(x: torch.Tensor, layout: Layout, given: torch.Tensor, sums: torch.Tensor, norm: NextNorm) -> HalfNorm:
    """The half of a norm that the product into the residual ``given`` begins, which must be ``sums`` each time."""
    for _ in range(5):
        residual = given.clone()
        half = partial_linear(x, layout, None, residual, norm)
        assert isinstance(half, HalfNorm)
        assert worst_row(residual, sums) < 6e-3
    assert not norm.counters.any()
    return half


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_halves_of_norms_of_rounded_activations(dtype: torch.dtype) -> None:
    """K is cut, and the last part of a tile adds all of them to the residual."""
    layout, following = rounded_rows(4096, 14336, dtype), rounded_rows(6144, 4096, dtype)
    norm = NextNorm(torch.rand(4096, device=CUDA).bfloat16() + 0.5, 1e-5, torch.zeros(4096, dtype=torch.int32).cuda())
    for tokens in (2, 5, 16):
        x, given = (torch.randn(tokens, width, device=CUDA).bfloat16() for width in (14336, 4096))
        rounded, scale = round_tokens(x, dtype)
        sums = given.float() + F.linear(rounded.float() * scale, layout.dense())
        half = begun(x, layout, given, sums, norm)
        rounded, scale = round_tokens(half.x, dtype)
        inverse = torch.rsqrt(sums.square().mean(1, keepdim=True) + 1e-5)
        assert worst_row(linear(half, following), F.linear(rounded.float() * scale * inverse, following.dense())) < 1e-2


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks of 128x128", "int4 groups of 128, zeros", "int4 rows"])
def test_halves_of_norms(name: str) -> None:
    """A product into the residual begins a norm, and a quantized product completes it."""
    layout, following = LAYOUTS[name](4096, 14336, CUDA), LAYOUTS[name](6144, 4096, CUDA)
    norm = NextNorm(torch.rand(4096, device=CUDA).bfloat16() + 0.5, 1e-5, torch.zeros(4096, dtype=torch.int32).cuda())
    for tokens in (1, 5, 16):
        x, given = (torch.randn(tokens, width, device=CUDA).bfloat16() for width in (14336, 4096))
        sums = given.float() + F.linear(x.float(), layout.dense())
        half = begun(x, layout, given, sums, norm)
        normed = sums * torch.rsqrt(sums.square().mean(1, keepdim=True) + 1e-5) * norm.weight.float()
        assert worst_row(linear(half, following), F.linear(normed, following.dense())) < 1.5e-2


@pytest.mark.parametrize("name", LAYOUTS | OTHERS)
def test_invariant(name: str) -> None:
    """Each token's bits are the same alone, in any batch and in a long prompt."""
    layout, x = (LAYOUTS | OTHERS)[name](1234, 4096, CUDA), torch.randn(1500, 4096, device=CUDA).bfloat16()
    for call in (linear_invariant, gated_linear_invariant, partial_linear_invariant):
        everything = whole(call(x, layout))
        assert everything.isfinite().all()
        for count in (1, 2, 7, 16, 17, 33, 64, 65, 129, 256):
            start = 13 * count % (1500 - count)
            assert torch.equal(whole(call(x[start : start + count], layout)), everything[start : start + count]), count


@pytest.mark.parametrize(
    "make",
    [lambda: w4_words(28672, 4096, 128, CUDA, zeros=True), lambda: w8_blocks(28672, 4096, E4M3, (128, 128), CUDA)],
)
def test_dequantized_for_the_library(make: Callable[[], Layout]) -> None:
    """In pieces that take little memory."""
    layout = make()
    assert kind_of(layout) is not None
    x = torch.randn(2000, 4096, device=CUDA).bfloat16()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = library_product(LinearKernel.DEQUANTIZED, x, layout, None, None)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < result.nbytes + 200e6
    assert worst_row(result, F.linear(x.float(), layout.dense())) < 6e-3


CHAINED: dict[str, Callable[..., Layout]] = {
    **{name: LAYOUTS[name] for name in ("fp8 rows", "fp8 blocks of 128x128", "int4 groups of 128, zeros")},
    "fp8 rows, rounded": lambda rows, size, _device: rounded_rows(rows, size, E4M3),
}


@pytest.mark.parametrize("name", CHAINED)
@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
def test_early_launches_give_the_same_bits(name: str, tokens: int) -> None:
    """A chain of products in a graph, many times: kernels read weights, and nothing else, before they wait."""
    first, second = CHAINED[name](2048, 2048, CUDA), CHAINED[name](2048, 2048, CUDA)
    scale = torch.tensor(1e-2, device=CUDA)
    x = torch.randn(tokens, 2048, device=CUDA).bfloat16()

    def chain(inputs: torch.Tensor) -> torch.Tensor:
        for layout in (first, second, first, second):
            inputs = linear(inputs, layout)
        return inputs * scale

    expected = chain(x)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        chain(x)
        with torch.cuda.graph(graph, stream=stream):
            out = chain(x)
    for _ in range(50):
        graph.replay()
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())
