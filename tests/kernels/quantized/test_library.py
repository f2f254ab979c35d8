"""Products of quantized weights by libraries: in pieces, and of activations in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import pagebus.kernels.quantized.library as library
import pagebus.kernels.quantized.products as products
from pagebus.kernels.coded.rounding import (
    RoundedTokens,
    round_tokens,
    round_tokens_reference,
    rounded_like,
    scale_sums,
    scale_sums_reference,
)
from pagebus.kernels.common.target import Target
from pagebus.kernels.layers.norm import add_rms_norm
from pagebus.kernels.linear.activation import activation_mul, rounded_activation_mul
from pagebus.kernels.linear.shapes import LinearKernel
from pagebus.kernels.quantized.library import library_product, pieces
from pagebus.kernels.quantized.products import gated_linear, linear, partial_linear, rounding_of
from tests.helpers.quantized.random_layouts import LAYOUTS, OTHERS, w8_rows


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_what_makes_tokens_rounds_them(dtype: torch.dtype, device: torch.device) -> None:
    """Norms of sums and activations: in one kernel the same numbers as in two."""
    x, residual = torch.randn(2, 3, 200, device=device), torch.randn(3, 200, device=device)
    weight, again = torch.rand(200, device=device), residual.clone()
    normed = add_rms_norm(x, residual, weight, 1e-5)
    rounded = add_rms_norm(x, again, weight, 1e-5, rounded=dtype)
    assert torch.equal(residual, again)
    assert isinstance(normed, torch.Tensor)
    assert isinstance(rounded, RoundedTokens)
    same(rounded, normed, dtype)
    gates = torch.randn(3, 400, device=device)
    for act in ("silu", "gelu_tanh"):
        same(rounded_activation_mul(gates, act, dtype), activation_mul(gates, act), dtype)
    assert rounded_activation_mul(gates[:0], "silu", dtype).values.shape == (0, 200)


def same(found: RoundedTokens, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """As `round_tokens` gives."""
    values, scale = round_tokens(exact, dtype)
    assert found.dtype == exact.dtype
    assert torch.allclose(found.scale, scale, rtol=1e-5)
    differ = found.values.float() != values.float()  # sums of another order may round to the neighbour
    assert differ.float().mean() < 0.01


def test_rounded_tokens_are_multiplied_as_they_are(device: torch.device) -> None:
    """By the library's product of their format."""
    layout, x = w8_rows(48, 64, torch.int8, device), torch.randn(20, 64, device=device)
    tokens = RoundedTokens(*round_tokens(x, torch.int8), x.dtype)
    expected = F.linear(tokens.exact.double(), layout.dense().double())
    assert torch.allclose(linear(tokens, layout).double(), expected, rtol=1e-4, atol=1e-4)
    product = partial_linear(tokens, layout)
    assert isinstance(product, torch.Tensor)
    assert torch.allclose(product.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_no_tokens_that_are_rounded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty pass is no error: a chunk of a prompt samples nothing, and the last layer goes on with no token."""
    monkeypatch.setattr(products, "target_of", lambda _: Target(90, 132))
    layout = replace(w8_rows(48, 64, dtype, torch.device("cpu")), rounded=True)
    none = torch.empty(0, 64, dtype=torch.bfloat16)
    for form, product in (("plain", linear), ("gated", gated_linear), ("partial", partial_linear)):
        assert rounding_of(none, layout, form) == dtype
        result = product(rounded_like(none, dtype), layout)
        assert isinstance(result, torch.Tensor)
        assert (result.shape, result.dtype) == ((0, 24 if form == "gated" else 48), torch.bfloat16)


def test_where_tokens_are_rounded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library multiplies them by rows, on a GPU."""
    cpu = torch.device("cpu")
    x, rows = torch.zeros(300, 64, dtype=torch.bfloat16), replace(w8_rows(48, 64, torch.int8, cpu), rounded=True)
    assert rounding_of(x, rows, "plain") is None
    monkeypatch.setattr(products, "target_of", lambda _: Target(90, 132))
    assert rounding_of(x, rows, "plain") == torch.int8
    assert rounding_of(x, replace(rows, values=rows.values.to(torch.float8_e4m3fn)), "gated") == torch.float8_e4m3fn
    assert rounding_of(x[:64], rows, "plain") == torch.int8  # for our own kernels
    assert rounding_of(x[:1], rows, "plain") is None
    for other in (torch.zeros(48, 64), replace(rows, rounded=False), LAYOUTS["fp8 blocks of 128x128"](48, 64, cpu)):
        assert rounding_of(x, other, "plain") is None
