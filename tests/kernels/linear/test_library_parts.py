"""The library's product in parts, which a CPU multiplies in float32 here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.linear.activation import activation_mul_reference
from pagebus.kernels.linear.library_parts import LibraryConfig
from pagebus.kernels.linear.linear import gated_linear, partial_linear


@pytest.fixture(autouse=True)
def _wide_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs have no batch of products with sums in another format than that of the inputs."""
    multiply = torch.bmm

    def bmm(inputs: torch.Tensor, rows: torch.Tensor, *, out_dtype: torch.dtype, out: torch.Tensor) -> torch.Tensor:
        return multiply(inputs.to(out_dtype), rows.to(out_dtype), out=out)

    monkeypatch.setattr(torch, "bmm", bmm)


def numbers(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), **options)


@pytest.mark.parametrize("splits", [2, 4])
def test_parts_of_k_add_up(splits: int) -> None:
    """To the product, also of inputs that are a view."""
    x, weight = numbers(5, 512)[:, 256:].to(torch.bfloat16), numbers(24, 256).to(torch.bfloat16)
    parts = partial_linear(x, weight, config=LibraryConfig(splits))
    assert isinstance(parts, torch.Tensor)
    assert (parts.shape, parts.dtype) == ((splits, 5, 24), torch.float32)
    torch.testing.assert_close(parts.sum(0), x.float() @ weight.float().t())


def test_a_bias_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one the product stays whole."""
    monkeypatch.setattr("pagebus.kernels.linear.linear.activation_mul", activation_mul_reference)
    x, weight, bias = numbers(5, 256), numbers(24, 256), numbers(24)
    whole = F.linear(x, weight, bias)
    found = partial_linear(x, weight, bias, config=LibraryConfig(2))
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, whole)
    gated = gated_linear(x, weight, bias, config=LibraryConfig(first=8))
    torch.testing.assert_close(gated, activation_mul_reference(whole))


@pytest.mark.parametrize("first", [4, 12, 20])
def test_rows_in_two_products(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the rows are cut: within gates, between them and what they multiply, or within that."""
    monkeypatch.setattr("pagebus.kernels.linear.linear.activation_mul", activation_mul_reference)
    x, weight = numbers(5, 64), numbers(24, 64)
    found = gated_linear(x, weight, config=LibraryConfig(first=first))
    torch.testing.assert_close(found, activation_mul_reference(F.linear(x, weight)))
