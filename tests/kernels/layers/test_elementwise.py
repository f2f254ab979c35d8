"""Embedding, norms, activation and block copies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.batch.copy_blocks import copy_blocks
from pagebus.kernels.common.int8 import block_bytes
from pagebus.kernels.layers.embedding import embedding, embedding_reference
from pagebus.kernels.layers.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from pagebus.kernels.layers.squares import row_squares, row_squares_reference
from pagebus.kernels.linear.activation import silu_mul, silu_mul_reference

SMALL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)  # the interpreter cuts bfloat16 results off instead of rounding them


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 37, 1500])
def test_embedding(dtype: torch.dtype, size: int, device: torch.device) -> None:
    """Rows by id, the same one twice, the last one, and none at all; a new tensor."""
    weight = torch.randn(50, size, device=device).to(dtype)
    for ids in ([3, 49, 3, 0], []):
        input_ids = torch.tensor(ids, dtype=torch.int32, device=device)
        for result in (embedding(input_ids, weight), embedding_reference(input_ids, weight)):
            assert torch.equal(result, torch.stack([weight[i] for i in ids]) if ids else weight[:0])
            assert result.data_ptr() != weight.data_ptr()


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


@pytest.mark.parametrize("size", [16, 100])
def test_row_squares(size: int, device: torch.device) -> None:
    """Of heads inside a fused projection; a row's sum is the same beside any others."""
    x = torch.randn(9, 2 * size, device=device)[:, size:]
    for result in (row_squares(x), row_squares_reference(x)):
        torch.testing.assert_close(result.double(), x.double().pow(2).sum(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(row_squares(x)[3:5], row_squares(x[3:5]))
    assert row_squares(x[:0]).shape == (0,)


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


@pytest.mark.parametrize("size", [130, 5000])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_add_rms_norm_of_parts(count: int, size: int, device: torch.device) -> None:
    """Parts of a product are added up first; a token's result is the same
    beside any others."""
    parts, weight = torch.randn(count, 5, size, device=device), torch.randn(size, device=device).half()
    residual = torch.randn(5, size, device=device).half()
    expected_residual, result_residual, alone = residual.clone(), residual.clone(), residual[3:4].clone()
    expected = add_rms_norm_reference(parts, expected_residual, weight, 1e-6)
    result = add_rms_norm(parts, result_residual, weight, 1e-6)
    torch.testing.assert_close(result_residual, expected_residual, atol=4e-3, rtol=1e-3)
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=1e-2)
    assert torch.equal(add_rms_norm(parts[:, 3:4].contiguous(), alone, weight, 1e-6), result[3:4])
    assert torch.equal(alone, result_residual[3:4])


def test_copy_blocks(device: torch.device) -> None:
    """Whole blocks are copied; a block that is both source and target gives what it held before."""
    sources, targets = (torch.tensor(ids, dtype=torch.int32, device=device) for ids in ([0, 2], [2, 5]))
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        cache = torch.randn(6, 2, 2, 16, 1, 6, device=device).to(dtype)
        expected = cache.clone()
        expected[2], expected[5] = cache[0], cache[2]
        copy_blocks(cache, sources, targets)
        assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))
    cache = torch.randint(-128, 128, (6, block_bytes(2, 16, 1, 6)), dtype=torch.int8, device=device)
    expected = cache.clone()
    expected[2], expected[5] = cache[0], cache[2]
    copy_blocks(cache, sources, targets)
    assert torch.equal(cache, expected)


def test_no_tokens(device: torch.device) -> None:
    """An empty pass is no error."""
    assert silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)
    assert rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), 1e-6).shape == (0, 8)
