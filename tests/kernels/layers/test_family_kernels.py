"""What some families need around their layers: norms of branches, wide weights, factors and soft caps."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.layers.branch_norm import add_normed, add_normed_reference
from pagebus.kernels.layers.embedding import embedding, embedding_reference
from pagebus.kernels.layers.logits import cap_logits, cap_logits_reference
from pagebus.kernels.layers.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

SMALL = {torch.float32: 2e-6, torch.float16: 4e-3}
DTYPES = list(SMALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wide_weight_is_rounded_once(dtype: torch.dtype, device: torch.device) -> None:
    """With weights in float32 only the product with the norm is rounded, as Gemma has it."""
    x, weight = torch.randn(5, 130, device=device).to(dtype), torch.randn(130, device=device) + 1
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    for call in (rms_norm, rms_norm_reference):
        result = call(x, weight, 1e-6)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, atol=SMALL[dtype] / 4, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [0, 3])
@pytest.mark.parametrize("follows", [False, True])
def test_add_normed(dtype: torch.dtype, parts: int, follows: bool, device: torch.device) -> None:
    """The norm of what is added, the sum, and the next norm; of partial sums too."""
    shape = (parts, 5, 130) if parts else (5, 130)
    x = torch.randn(shape, device=device).to(torch.float32 if parts else dtype)
    residual, weights = torch.randn(5, 130, device=device).to(dtype), torch.randn(2, 130, device=device) + 1
    following = weights[1] if follows else None
    whole = (x.sum(0) if parts else x).to(dtype)
    mine, theirs, written = residual.clone(), residual.clone(), residual.clone()
    written += rms_norm_reference(whole, weights[0], 1e-6)
    result, expected = (
        call(x, into, weights[0], 1e-6, following)
        for call, into in ((add_normed, mine), (add_normed_reference, theirs))
    )
    assert torch.equal(theirs, written)
    torch.testing.assert_close(mine, theirs, atol=SMALL[dtype], rtol=1e-2)
    assert (result is None) == (expected is None) == (not follows)
    if result is not None and expected is not None:
        assert torch.equal(expected, rms_norm_reference(written, weights[1], 1e-6))
        torch.testing.assert_close(result, expected, atol=SMALL[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_may_be_scaled(dtype: torch.dtype, device: torch.device) -> None:
    """The product is rounded before it is added."""
    x, residual = torch.randn(2, 5, 130, device=device).to(dtype).unbind(0)
    weight = torch.randn(130, device=device).to(dtype)
    mine, theirs = residual.clone(), residual.clone()
    expected = add_rms_norm_reference(x, theirs, weight, 1e-6, 0.22)
    assert torch.equal(theirs, residual + x * 0.22)
    torch.testing.assert_close(add_rms_norm(x, mine, weight, 1e-6, 0.22), expected, atol=SMALL[dtype], rtol=1e-2)
    torch.testing.assert_close(mine, theirs, atol=SMALL[dtype], rtol=1e-3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_may_be_centred(dtype: torch.dtype, biased: bool, device: torch.device) -> None:
    """A layer norm, with and without a bias, of rows whose width is no power of two, alone and behind a sum."""
    x, residual = (torch.randn(2, 5, 130, device=device) + 3).to(dtype).unbind(0)
    weight, bias = torch.randn(2, 130, device=device).unbind(0)
    given, wide = (bias, bias.double()) if biased else (None, None)
    exact = torch.nn.functional.layer_norm(x.double(), (130,), weight.double(), wide, eps=1e-5)
    for call in (rms_norm, rms_norm_reference):
        result = call(x, weight, 1e-5, centred=True, bias=given)
        torch.testing.assert_close(result.double(), exact, atol=SMALL[dtype], rtol=1e-2)
    total = residual + x
    exact = torch.nn.functional.layer_norm(total.double(), (130,), weight.double(), wide, eps=1e-5)
    for add in (add_rms_norm, add_rms_norm_reference):
        into = residual.clone()
        result = add(x, into, weight, 1e-5, centred=True, bias=given)
        torch.testing.assert_close(result.double(), exact, atol=SMALL[dtype], rtol=1e-2)
        assert torch.equal(into, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_times_a_factor(dtype: torch.dtype, device: torch.device) -> None:
    """The matrix stays as it is."""
    weight, ids = torch.randn(50, 37, device=device).to(dtype), torch.tensor([3, 49, 3], dtype=torch.int32)
    before = weight.clone()
    for call in (embedding, embedding_reference):
        assert torch.equal(call(ids.to(device), weight, 7.5), before[ids.long()] * 7.5)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(("scale", "softcap"), [(0.25, 0.0), (1.0, 3.0), (0.5, 30.0)])
def test_cap_logits(scale: float, softcap: float, device: torch.device) -> None:
    """A factor, a cap, both; far beyond the cap as well."""
    logits = torch.randn(3, 2500, device=device) * 40
    exact = logits.double() * scale
    exact = (exact / softcap).tanh() * softcap if softcap else exact
    for call in (cap_logits, cap_logits_reference):
        changed = logits.clone()
        call(changed, scale, softcap)
        torch.testing.assert_close(changed.double(), exact, atol=1e-5, rtol=1e-5)
