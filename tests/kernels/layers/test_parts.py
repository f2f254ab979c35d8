"""Sums of parts of prompts."""

from __future__ import annotations

import pytest
import torch

from pagebus.kernels.layers.parts import TOKENS, sum_parts, sum_parts_reference

DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 100, 130])
def test_sum_parts(dtype: torch.dtype, size: int, device: torch.device) -> None:
    """Of one token, which stays as it is, of several tiles of tokens, one that overlaps, and empty ones; garbage around
    the parts is not read."""
    total = 3 * TOKENS + 9
    states = torch.full((total, size), torch.nan, device=device, dtype=dtype)
    states[2 : total - 2] = torch.randn(total - 4, size, device=device).to(dtype)
    parts = [(2, 1), (3, 2 * TOKENS + 1), (3, TOKENS), (total - 5, 3), (0, 0), (total + 1000, 0)]
    firsts, counts = torch.tensor(parts, dtype=torch.int32, device=device).t().contiguous().unbind()
    for call in (sum_parts, sum_parts_reference):
        sums = call(states, firsts, counts)
        assert sums.dtype == torch.float32
        assert torch.equal(sums[0], states[2].float())
        for (first, count), found in zip(parts, sums, strict=True):
            torch.testing.assert_close(found, states[first : first + count].float().sum(0), atol=1e-4, rtol=1e-4)
        assert call(states, firsts[:0], counts[:0]).shape == (0, size)


def test_a_sum_depends_on_no_other_part(device: torch.device) -> None:
    """Bit for bit, wherever the part lies."""
    states = torch.randn(300, 96, device=device)
    moved = torch.cat((torch.randn(7, 96, device=device), states))
    one, two = (torch.tensor([each], dtype=torch.int32, device=device) for each in (0, 299))
    several = torch.tensor([3, 7, 9], dtype=torch.int32, device=device)
    counts = torch.tensor([5, 299, 1], dtype=torch.int32, device=device)
    assert torch.equal(sum_parts(states, one, two)[0], sum_parts(moved, several, counts)[1])
