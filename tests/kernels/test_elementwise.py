"""Norms, activation, rotary embedding, cache writes and block copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.activation import silu_mul, silu_mul_reference
from kernels.copy_blocks import copy_blocks
from kernels.kv_write import kv_write, kv_write_reference
from kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from kernels.rotary import rotary_embedding_, rotary_embedding_reference_

SMALL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)  # the interpreter cuts bfloat16 results off instead of rounding them


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 37, 1536])
def test_silu_mul(dtype: torch.dtype, size: int, device: torch.device) -> None:
    """Gate and up halves, for sizes that fill no block and several."""
    x = torch.randn(5, 2 * size, device=device).to(dtype)
    expected = (F.silu(x[:, :size].double()) * x[:, size:].double()).to(dtype)
    for result in (silu_mul(x), silu_mul_reference(x)):
        torch.testing.assert_close(result, expected, atol=SMALL[dtype], rtol=1e-2 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 96, 1000])
def test_rms_norm(dtype: torch.dtype, size: int, device: torch.device) -> None:
    """Rows, and heads inside a fused projection; into a new tensor and in place."""
    weight = torch.randn(size, device=device).to(dtype)
    for x in (torch.randn(7, size, device=device).to(dtype), torch.randn(3, 9, size, device=device).to(dtype)[:, 2:7]):
        expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        reference = rms_norm_reference(x, weight, 1e-5)
        torch.testing.assert_close(reference.double(), expected, atol=SMALL[dtype], rtol=2e-2)
        out = torch.full_like(reference, torch.nan)
        assert rms_norm(x, weight, 1e-5, out=out) is out
        torch.testing.assert_close(out, reference, atol=SMALL[dtype], rtol=1e-2)
        in_place = x.clone()
        rms_norm(in_place, weight, 1e-5, out=in_place)
        torch.testing.assert_close(in_place, out, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype, device: torch.device) -> None:
    """The residual takes the sum, rounded, and that sum is what is normalised."""
    x, residual = torch.randn(2, 5, 130, device=device).to(dtype).unbind(0)
    weight = torch.randn(130, device=device).to(dtype)
    expected_residual, result_residual = residual.clone(), residual.clone()
    expected = add_rms_norm_reference(x, expected_residual, weight, 1e-6)
    assert torch.equal(expected_residual, residual + x)
    assert torch.equal(expected, rms_norm_reference(residual + x, weight, 1e-6))
    result = add_rms_norm(x, result_residual, weight, 1e-6)
    assert torch.equal(result_residual, expected_residual)
    torch.testing.assert_close(result, expected, atol=SMALL[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 32)])
def test_rotary(dtype: torch.dtype, head_dim: int, rotary_dim: int, device: torch.device) -> None:
    """Each pair (i, i + half) turns by its angle; dimensions past rotary_dim and values between q and k stay."""
    fused = torch.randn(6, 9, head_dim, device=device).to(dtype)
    angles = torch.rand(50, rotary_dim // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1)
    positions = torch.tensor([0, 49, 3, 3, 17, 8], device=device, dtype=torch.int32)
    expected = fused.clone()
    pair = torch.complex(*fused[:, :8, :rotary_dim].double().chunk(2, dim=-1))
    pair = pair * torch.polar(torch.ones_like(angles), angles)[positions.long()].unsqueeze(1)
    expected[:, :8, :rotary_dim] = torch.cat((pair.real, pair.imag), -1).to(dtype)
    for rotate in (rotary_embedding_, rotary_embedding_reference_):
        result = fused.clone()
        rotate(result[:, :5], result[:, 5:8], positions, table)
        torch.testing.assert_close(result, expected, atol=SMALL[dtype], rtol=1e-2)


@pytest.mark.parametrize("block_size", [16, 48])
def test_kv_write(block_size: int, device: torch.device) -> None:
    """Each token lands in its place of one layer, skipped tokens nowhere, all else stays."""
    fused = torch.randn(5, 10, 24, device=device)
    k, v = fused[:, 4:7], fused[:, 7:10]
    cache = torch.full((9, 3, 2, block_size, 3, 24), 5.0, device=device)
    mapping = torch.tensor([3 * block_size + 7, -1, 0, 9 * block_size - 1, -1], device=device)
    expected = cache.clone()
    for token in (0, 2, 3):
        block, offset = divmod(int(mapping[token]), block_size)
        expected[block, 1, 0, offset], expected[block, 1, 1, offset] = k[token], v[token]
    for write in (kv_write, kv_write_reference):
        result = cache.clone()
        write(k, v, result[:, 1, 0], result[:, 1, 1], mapping)
        assert torch.equal(result, expected)


def test_copy_blocks(device: torch.device) -> None:
    """Whole blocks are copied; a block that is both source and target gives what it held before."""
    cache = torch.randn(6, 2, 2, 16, 1, 4, device=device)
    expected = cache.clone()
    expected[2], expected[5] = cache[0], cache[2]
    copy_blocks(
        cache,
        torch.tensor([0, 2], dtype=torch.int32, device=device),
        torch.tensor([2, 5], dtype=torch.int32, device=device),
    )
    assert torch.equal(cache, expected)


def test_no_tokens(device: torch.device) -> None:
    """An empty pass is no error."""
    assert silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)
    assert rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-6).shape == (0, 8)
