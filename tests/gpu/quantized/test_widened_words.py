"""Products with words that the multiplying warps widen, against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.linear.linear import gated_linear, linear, partial_linear
from pagebus.kernels.quantized.coding import coded_of
from pagebus.kernels.specialized.hopper_words import WideningConfig
from tests.gpu.errors import worst_row
from tests.helpers.quantized.random_layouts import w4_words

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
WIDTHS = ((128, True), (128, False), (32, False), (64, False), (256, True))
"""Groups, and whether these have zeros."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("shape", [(128, 256), (256, 128), (128, 32), (256, 64)])
@pytest.mark.parametrize("number", range(len(WIDTHS)))
def test_words_widened_where_they_are_multiplied(shape: tuple[int, int], number: int) -> None:
    """Odd numbers of tokens and rows, several tiles for each multiprocessor, K in parts, a bias, float16."""
    (group, zeros), (rows, tokens) = WIDTHS[number], shape
    dtype = torch.float16 if number % 2 else torch.bfloat16
    count_rows = 4128 if zeros else 4112  # zeros of groups, and of gates, begin at multiples of 16 bytes
    layout, config = w4_words(count_rows, 1024, group, CUDA, zeros=zeros), WideningConfig(tokens, 1, rows)
    coded, bias = coded_of(layout), torch.randn(count_rows, device=CUDA).to(dtype)
    assert coded is not None
    for count in (1, 31, tokens, 3 * tokens + 5):
        x = torch.randn(count, 1024, device=CUDA).to(dtype)
        expected = F.linear(x.float(), layout.dense(), bias.float())
        assert worst_row(linear(x, coded, bias, config=config), expected) < 1e-2
        cut = linear(x, coded, bias, config=WideningConfig(tokens, 4, rows))
        assert worst_row(cut, expected) < 1e-2
        gate, up = expected.chunk(2, dim=1)
        assert worst_row(gated_linear(x, coded, bias, config=config), F.silu(gate) * up) < 2e-2
        parts = partial_linear(x, coded, config=WideningConfig(tokens, 4, rows))
        assert isinstance(parts, torch.Tensor)
        assert worst_row(parts.sum(0), expected - bias.float()) < 1e-2
