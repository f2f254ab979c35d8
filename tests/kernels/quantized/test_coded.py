"""Kernels of products read quantized weights: tiles and vectors, every form, all edges."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.coded.rounding import RoundedTokens, round_tokens
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear, residual_linear
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.quantized.coding import coded_of, kind_of
from pagebus.kernels.quantized.layouts import Layout, W8Blocks, W8Rows
from tests.helpers.quantized.random_layouts import LAYOUTS, TILES_ONLY

pytestmark = pytest.mark.share(6)

LIMITS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float32, torch.float16]
SIZES = {"even": (32, 256), "odd": (42, 200)}
"""Rows and columns: of whole tiles, and of parts of tiles."""
PLAIN = {name: make for name, make in LAYOUTS.items() if "ordered" not in name and name not in TILES_ONLY}
"""`test_experts.py` has the others, which are read by the same loops."""


def configs(layout: Layout) -> list[tuple[int, Config]]:
    """Launch shapes for numbers of tokens."""
    kind, coded = kind_of(layout), coded_of(layout)
    assert kind is not None
    assert coded is not None
    shapes: list[tuple[int, Config]] = [(5, TileConfig(24, 16, kind.depth, 3, 2))]
    if kind.code.in_words:
        shapes += [(20, TileConfig(24, 32, 128, 3, 2))]
        shapes += [] if kind.lows else [(5, TileConfig(24, 8, 256, 3, 2)), (20, TileConfig(24, 32, 256, 3, 2))]
    return [*shapes, (1, VectorConfig(2, 128, 1))] if coded.plain else shapes


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("size", "dtype"), list(zip(SIZES, DTYPES, strict=True)))
@pytest.mark.parametrize("name", PLAIN)
def test_products_are_those_of_dense_weights(name: str, size: str, dtype: torch.dtype, device: torch.device) -> None:
    """Plain with a bias, and gated."""
    rows, columns = SIZES[size]
    layout = PLAIN[name](rows, columns, device)
    weight, exact = coded_of(layout), layout.dense().double()
    assert weight is not None
    bias = torch.randn(rows, device=device).to(dtype)
    for tokens, config in configs(layout):
        x = torch.randn(tokens, columns, device=device).to(dtype)
        expected = F.linear(x.double(), exact)
        result = linear(x, weight, bias, config=config)
        assert result.dtype == dtype
        assert relative_error(result, expected + bias.double()) < LIMITS[dtype]
        if size == "even":
            continue
        gate, up = expected.chunk(2, dim=1)
        assert relative_error(gated_linear(x, weight, config=config), F.silu(gate) * up) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("name", ["fp8 rows", "fp8 blocks of 128x128", "int4 groups of 128, zeros", "int4 rows"])
def test_splits_and_norms(name: str, device: torch.device) -> None:
    """Partial sums of K; products into the residual, and the products behind that complete its norm."""
    layout = PLAIN[name](64, 512, device)
    weight, following = coded_of(layout), PLAIN[name](32, 64, device)
    exact, dtype = layout.dense().double(), DTYPES[-1]
    x, given = torch.randn(3, 512, device=device).to(dtype), torch.randn(3, 64, device=device).to(dtype)
    expected = F.linear(x.double(), exact)
    split = TileConfig(32, 16, 128, 2, 2, 2)
    parts = partial_linear(x, weight, config=split)
    assert isinstance(parts, torch.Tensor)
    assert parts.shape == (2, 3, 64)
    assert relative_error(parts.sum(0), expected) < 1e-4
    norm = NextNorm(torch.rand(64, device=device).to(dtype), 1e-5, torch.zeros(64, dtype=torch.int32, device=device))
    for config in (split, TileConfig(32, 16, 128, 2, 2)):
        residual = given.clone()
        half = residual_linear(x, weight, None, residual, norm, config)
        assert isinstance(half, HalfNorm)
        assert relative_error(residual, given.double() + expected) < LIMITS[dtype]
        whole = residual.double() * norm.weight.double()
        whole *= torch.rsqrt(residual.double().pow(2).mean(1, keepdim=True) + 1e-5)
        behind = coded_of(following)
        result = linear(half, behind, config=TileConfig(32, 16, 128 if "int4" in name else 64, 2, 2))
        assert relative_error(result, F.linear(whole, following.dense().double())) < 3 * LIMITS[dtype]


@pytest.mark.parametrize("name", ["fp8 rows", "int8 rows"])
def test_tokens_that_are_rounded_already(name: str, device: torch.device) -> None:
    """Every form is that of tokens that the product rounds itself, bit for bit."""
    layout, dtype = PLAIN[name](64, 512, device), DTYPES[-1]
    weight = coded_of(layout)
    assert weight is not None
    assert isinstance(layout, W8Rows)
    x = torch.randn(5, 512, device=device).to(dtype)
    rounded = RoundedTokens(*round_tokens(x, layout.values.dtype), dtype)
    for splits in (1, 2):
        config = TileConfig(32, 16, 128, 2, 2, splits, rounded=True)
        expected, found = (partial_linear(each, weight, config=config) for each in (x, rounded))
        assert isinstance(expected, torch.Tensor)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)
        assert found.dtype == (dtype if splits == 1 else torch.float32)
    config = TileConfig(32, 16, 128, 2, 2, rounded=True)
    assert torch.equal(linear(rounded, weight, config=config), linear(x, weight, config=config))
    assert torch.equal(gated_linear(rounded, weight, config=config), gated_linear(x, weight, config=config))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["fp8 rows", "int8 rows", "fp8 blocks of 128x128"])
def test_rounded_tokens(name: str, size: str, device: torch.device) -> None:
    """8 bits times 8 bits are the products of the rounded tokens: plain with a bias, gated, of a half norm, in parts of
    K, and into the residual."""
    rows, columns = SIZES[size]
    layout, dtype = PLAIN[name](rows, columns, device), DTYPES[-1]
    weight, bias = coded_of(layout), torch.randn(rows, device=device).to(dtype)
    assert weight is not None
    assert isinstance(layout, W8Rows | W8Blocks)
    x = torch.randn(5, columns, device=device).to(dtype)
    values, scale = round_tokens(x, layout.values.dtype, grouped=weight.width > 0)
    spread = scale.double().repeat_interleave(weight.width or columns, 1)[:, :columns]
    expected = F.linear(values.double() * spread, layout.dense().double())
    config = TileConfig(24, 16, 128, 3, 2, rounded=True)
    assert relative_error(linear(x, weight, bias, config=config), expected + bias.double()) < LIMITS[dtype]
    gate, up = expected.chunk(2, dim=1)
    assert relative_error(gated_linear(x, weight, config=config), F.silu(gate) * up) < 2 * LIMITS[dtype]
    squares = torch.rand(2, 5, device=device) * columns
    normed = expected * torch.rsqrt(squares.double().sum(0) / columns + 1e-5)[:, None]
    assert relative_error(linear(HalfNorm(x, squares, 1e-5), weight, config=config), normed) < LIMITS[dtype]
    if size == "odd":
        return
    split = TileConfig(32, 16, 128, 2, 2, 2, rounded=True)
    parts = partial_linear(x, weight, config=split)
    assert isinstance(parts, torch.Tensor)
    assert relative_error(parts.sum(0), expected) < 1e-4
    residual = torch.randn(5, rows, device=device).to(dtype)
    norm = NextNorm(torch.rand(rows, device=device).to(dtype), 1e-5, torch.zeros(rows, dtype=torch.int32).to(device))
    sums = residual.double() + expected
    residual_linear(x, weight, None, residual, norm, split)
    assert relative_error(residual, sums) < LIMITS[dtype]
