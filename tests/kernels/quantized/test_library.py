"""Products of quantized weights by libraries: in pieces, and of activations in 8 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import pagebus.kernels.quantized.library as library
from pagebus.kernels.coded.rounding import (
    round_tokens,
    round_tokens_reference,
    scale_sums,
    scale_sums_reference,
)
from pagebus.kernels.linear.shapes import LinearKernel
from pagebus.kernels.quantized.library import library_product, pieces
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS


def test_pieces_cover_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In multiples of 16, within the scratch."""
    monkeypatch.setattr(library, "SCRATCH_BYTES", 40 * 100)
    assert list(pieces(70, 100)) == [(0, 32), (32, 64), (64, 70)]
    assert list(pieces(40, 10_000)) == [(0, 16), (16, 32), (32, 40)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["fp8 rows", "int4 groups of 32, lows", "nvfp4"])
def test_dequantized_in_pieces(name: str, biased: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its part of the bias."""
    monkeypatch.setattr(library, "SCRATCH_BYTES", 20 * 256 * 4)
    layout = (LAYOUTS | OTHERS)[name](50, 256, device)
    x, bias = torch.randn(7, 256, device=device), torch.randn(50, device=device) if biased else None
    result = library_product(LinearKernel.DEQUANTIZED, x, layout, bias, None)
    assert torch.allclose(result, F.linear(x, layout.dense(), bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_tokens_are_rounded_to_8_bits(dtype: torch.dtype, device: torch.device) -> None:
    """Each by its own largest number; one of zeros stays zeros."""
    x = torch.randn(5, 200, device=device) * torch.tensor([[1e-3], [1.0], [50.0], [0.0], [3.0]], device=device)
    rounded, scale = round_tokens(x[:, :100], dtype)
    expected, wanted = round_tokens_reference(x[:, :100], dtype)
    assert torch.equal(scale, wanted)
    # The interpreter loses what is carried into the exponent of a float8.
    known = torch.frexp(expected.float())[0].abs() != (0.0 if device.type == "cuda" or dtype == torch.int8 else 0.5)
    wrong = known & (rounded.float() != expected.float())
    close = (rounded.float() - expected.float()).abs() <= 2**-9 + expected.float().abs() / 8
    assert close[known].all()  # of two that are equally near, either; 2^-9 is the smallest float8
    assert wrong.float().mean() < 0.01
    assert rounded[3].float().abs().sum() == 0
    assert ((rounded.float() * scale - x[:, :100]).abs() <= x[:, :100].abs() / 14 + scale)[known].all()


def test_whole_sums_are_scaled(device: torch.device) -> None:
    """By token and row, into a part of wider rows."""
    sums = torch.randint(-(10**6), 10**6, (5, 70), dtype=torch.int32, device=device)
    tokens, rows = torch.rand(5, 1, device=device), torch.rand(70, device=device)
    for bias in (None, torch.randn(70, device=device)):
        wide = torch.zeros(5, 100, device=device)
        scale_sums(sums, tokens, rows, bias, wide[:, 20:90])
        expected = scale_sums_reference(sums, tokens, rows, bias, torch.empty(5, 70, device=device))
        assert torch.allclose(wide[:, 20:90], expected, rtol=1e-6)
        assert wide[:, :20].abs().sum() == wide[:, 90:].abs().sum() == 0


def test_int8_by_int8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounded activations give, exactly; in pieces."""
    monkeypatch.setattr(library, "SCRATCH_BYTES", 32 * 20 * 4)
    layout, x = LAYOUTS["int8 rows"](64, 128, device), torch.randn(20, 128, device=device)
    rounded, scale = round_tokens(x, torch.int8)
    bias = torch.randn(64, device=device)
    result = library_product(LinearKernel.INT_MM, x, layout, bias, None)
    expected = F.linear(rounded.double() * scale.double(), layout.dense().double(), bias.double())
    assert torch.allclose(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert (result - F.linear(x, layout.dense(), bias)).norm() / result.norm() < 0.02
