"""Products of few tokens with weights: both kernels, every form, all edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.layers.norm import HalfNorm, NextNorm, add_rms_norm, add_rms_norm_reference, rms_norm_reference
from pagebus.kernels.linear.gemv import VectorConfig
from pagebus.kernels.linear.linear import (
    gated_linear,
    gated_linear_reference,
    linear,
    linear_reference,
    partial_linear,
    residual_linear,
    residual_linear_reference,
)
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.linear.skinny_gemm import TileConfig

pytestmark = pytest.mark.share(6)

LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)  # the interpreter's bfloat16 products are wrong
CONFIGS: list[tuple[int, Config]] = [
    (1, VectorConfig(8, 64, 4)),
    (1, VectorConfig(4, 32, 4, 2)),
    (3, VectorConfig(4, 64, 4, 2)),
    (1, TileConfig(16, 16, 64, 3, 4)),
    (5, TileConfig(24, 16, 32, 3, 4)),
    (40, TileConfig(32, 16, 64, 2, 4)),
    (40, TileConfig(64, 64, 32, 2, 4)),
    (5, TileConfig(32, 16, 32, 2, 4, tma=True)),
    (40, TileConfig(64, 16, 64, 2, 4, tma=True)),
]

NORMED: list[tuple[int, Config]] = [
    (1, VectorConfig(8, 64, 4)),
    (3, VectorConfig(4, 64, 4, 2)),
    (5, TileConfig(24, 16, 32, 3, 4)),
    (20, TileConfig(32, 16, 32, 2, 4, 2)),
    (5, TileConfig(64, 16, 32, 2, 4, 4, tma=True)),
]


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def make(tokens: int, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, a view into wider rows; weight; bias."""
    x = torch.randn(tokens, size + 8, device=device)[:, :size].to(dtype)
    x = torch.cat((x, x), 1)[:, :size]
    return x, torch.randn(rows, size, device=device).to(dtype) / size**0.5, torch.randn(rows, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "config"), CONFIGS)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(tokens: int, config: Config, dtype: torch.dtype, biased: bool, device: torch.device) -> None:
    """x Wᵀ + b for rows of weights that do not fill the last tile, in x's dtype and in float32."""
    x, weight, bias = make(tokens, 70, 128, dtype, device)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    result = linear(x, weight, bias if biased else None, config=config)
    assert result.dtype == dtype
    assert relative_error(result, expected) < LIMITS[dtype]
    wide = linear(x, weight, bias if biased else None, torch.float32, config=config)
    assert wide.dtype == torch.float32
    assert relative_error(wide, expected) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "config"), CONFIGS)
def test_gated_linear(tokens: int, config: Config, dtype: torch.dtype, device: torch.device) -> None:
    """silu(gate) * up where the tiles cut through both halves."""
    x, weight, bias = make(tokens, 2 * 37, 128, dtype, device)
    for b in (None, bias):
        gate, up = F.linear(x.double(), weight.double(), None if b is None else b.double()).chunk(2, dim=1)
        result = gated_linear(x, weight, b, config=config)
        assert relative_error(result, F.silu(gate) * up) < 2 * LIMITS[dtype]
        assert relative_error(gated_linear_reference(x, weight, b), F.silu(gate) * up) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("config", [VectorConfig(8, 64, 4), TileConfig(32, 16, 64, 3, 4), None])
def test_gated_by_gelu(config: Config | None, device: torch.device) -> None:
    """The same with GELU, by our kernels and behind the library's product."""
    x, weight, _ = make(2, 2 * 37, 128, torch.float32, device)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=1)
    expected = F.gelu(gate, approximate="tanh") * up
    for call in (lambda: gated_linear(x, weight, config=config, act="gelu_tanh"),
                 lambda: gated_linear_reference(x, weight, act="gelu_tanh")):  # fmt: skip
        assert relative_error(call(), expected) < 2 * LIMITS[torch.float32]


@pytest.mark.parametrize("config", [VectorConfig(8, 64, 4), VectorConfig(8, 32, 4, 2), TileConfig(32, 16, 64, 3, 4)])
def test_odd_depth(config: Config, device: torch.device) -> None:
    """K that is no multiple of the tiles' depth."""
    x, weight, bias = make(2, 24, 104, torch.float32, device)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert relative_error(linear(x, weight, bias, config=config), expected) < 1e-6


@pytest.mark.parametrize(("depth", "splits", "size"), [(128, 2, 448), (64, 4, 448), (64, 3, 456), (32, 2, 40)])
def test_uneven_parts(depth: int, splits: int, size: int, device: torch.device) -> None:
    """The last part of K has fewer columns than the others."""
    x, weight, _ = make(5, 70, size, torch.float16, device)
    config = TileConfig(32, 16, depth, 2, 4, splits, tma=True)
    assert config.fits(size)
    assert size % config.part(size)
    parts = partial_linear(x, weight, config=config)
    assert relative_error(parts.sum(0), F.linear(x.double(), weight.double())) < 1e-6
    assert not TileConfig(32, 16, 128, 2, 4, 4, tma=True).fits(384)


@pytest.mark.parametrize("dtype", DTYPES)
def test_partial_linear(dtype: torch.dtype, device: torch.device) -> None:
    """Partial sums, added up by the norm, are what the product and the plain norm give."""
    x, weight, bias = make(5, 70, 256, dtype, device)
    parts = partial_linear(x, weight, config=TileConfig(32, 16, 32, 2, 4, 4))
    others = partial_linear(x, weight, config=TileConfig(32, 16, 64, 2, 4, 4, tma=True))
    assert relative_error(others, parts.double()) < 1e-6
    assert parts.shape == (4, 5, 70)
    assert parts.dtype == torch.float32
    expected = F.linear(x.double(), weight.double())
    assert relative_error(parts.sum(0), expected) < 1e-6
    biased = partial_linear(x, weight, bias, config=TileConfig(32, 16, 32, 2, 4, 4))
    assert relative_error(biased, expected + bias) < LIMITS[dtype]
    residual, norm = torch.randn(5, 70, device=device).to(dtype), torch.randn(70, device=device).to(dtype)
    other, third = residual.clone(), residual.clone()
    result = add_rms_norm(parts, residual, norm, 1e-5)
    assert relative_error(residual, other.double() + expected) < LIMITS[dtype]
    assert relative_error(result, add_rms_norm_reference(parts, other, norm, 1e-5).double()) < 2 * LIMITS[dtype]
    plain = add_rms_norm_reference(linear_reference(x, weight), third, norm, 1e-5)
    assert relative_error(result, plain.double()) < 4 * LIMITS[dtype]


@pytest.mark.parametrize(("tokens", "config"), NORMED)
def test_residual_linear(tokens: int, config: Config, device: torch.device) -> None:
    """The product is added to the residual; of the sum half a norm is left, with its squares in parts. Counters are as
    they were."""
    x, weight, bias = make(tokens, 70, 128, DTYPES[-1], device)
    counters = torch.zeros(70, dtype=torch.int32, device=device)
    norm = NextNorm(torch.rand(70, device=device).to(x.dtype) + 0.5, 1e-5, counters)
    residual = torch.randn(tokens, 70, device=device).to(x.dtype)
    other = residual.clone()
    half = residual_linear(x, weight, bias, residual, norm, config)
    expected = residual_linear_reference(x, weight, bias, other, norm)
    assert relative_error(residual, other.double()) < LIMITS[x.dtype]
    assert half.x.dtype == x.dtype
    assert relative_error(half.x, expected.x.double()) < LIMITS[x.dtype]
    assert relative_error(half.squares.sum(0), expected.squares.sum(0).double()) < LIMITS[x.dtype]
    assert not counters.any()


@pytest.mark.parametrize(("tokens", "config"), NORMED)
def test_half_norm(tokens: int, config: Config, device: torch.device) -> None:
    """Products complete a half norm: theirs are those of the whole norm, with the bias as it is."""
    x, weight, bias = make(tokens, 74, 128, DTYPES[-1], device)
    norm = torch.rand(128, device=device).to(x.dtype) + 0.5
    squares = torch.stack([part.float().square().sum(1) for part in x.split(40, dim=1)])
    half, whole = HalfNorm(x * norm, squares, 1e-5), rms_norm_reference(x.double(), norm.double(), 1e-5)
    expected = F.linear(whole, weight.double(), bias.double())
    config = replace(config, splits=1) if isinstance(config, TileConfig) else config
    assert relative_error(linear(half, weight, bias, config=config), expected) < 2 * LIMITS[x.dtype]
    assert relative_error(linear(half, weight, bias, torch.float32, config=config), expected) < 2 * LIMITS[x.dtype]
    gate, up = expected.chunk(2, dim=1)
    assert relative_error(gated_linear(half, weight, bias, config=config), F.silu(gate) * up) < 4 * LIMITS[x.dtype]


def test_no_tokens(device: torch.device) -> None:
    """An empty pass is no error."""
    x, weight, _ = make(0, 8, 16, torch.float32, device)
    assert linear(x, weight).shape == (0, 8)
    assert gated_linear(x, weight).shape == (0, 4)
    assert partial_linear(x, weight).shape == (0, 8)
