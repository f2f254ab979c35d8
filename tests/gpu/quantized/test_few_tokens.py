"""Products of a few tokens with words that come through a ring, against the dequantized weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.coded.weights import Coded
from pagebus.kernels.layers.norm import HalfNorm, NextNorm
from pagebus.kernels.linear.linear import gated_linear, linear, residual_linear
from pagebus.kernels.quantized.coding import coded_of
from pagebus.kernels.specialized.hopper_few import FewConfig
from tests.gpu.errors import worst_row
from tests.helpers.quantized.random_layouts import w4_words

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
CONFIGS = (
    (1024, FewConfig(8, 1)), (1024, FewConfig(16, 2)), (3968, FewConfig(8, 4)), (3968, FewConfig(8, 2, 2)),
    (3968, FewConfig(16, 4)), (3968, FewConfig(16, 1, 4)),
)  # fmt: skip
"""By inputs. Of 3,968, and of 1,024 in two steps, the last tiles of columns do not exist."""
LIMIT = 6e-3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def given(
    rows: int, inputs: int, tokens: int, dtype: torch.dtype = torch.bfloat16, *, zeros: bool = True
) -> tuple[torch.Tensor, Coded, torch.Tensor]:
    """Inputs, a weight, and their product in float32."""
    layout = w4_words(rows, inputs, 128, CUDA, zeros=zeros)
    coded, x = coded_of(layout), torch.randn(tokens, inputs, device=CUDA).to(dtype)
    assert coded is not None
    return x, coded, F.linear(x.float(), layout.dense())


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("inputs", "config"), CONFIGS)
def test_forms(inputs: int, config: FewConfig, *, zeros: bool) -> None:
    """More tiles of rows than multiprocessors, and fewer; one token, some, and all; biases."""
    for rows, tokens in ((4128, 1), (4128, config.tokens - 3), (96, config.tokens)):
        x, coded, expected = given(rows, inputs, tokens, zeros=zeros)
        bias = torch.randn(rows, device=CUDA).bfloat16()
        assert worst_row(linear(x, coded, bias, config=config), expected + bias.float()) < LIMIT
        assert worst_row(linear(x, coded, None, torch.float32, config), expected) < LIMIT
        gate, up = (expected + bias.float()).chunk(2, dim=1)
        assert worst_row(gated_linear(x, coded, bias, config=config), F.silu(gate) * up) < 2e-2


@pytest.mark.parametrize(("inputs", "config"), CONFIGS)
def test_halves_of_norms(inputs: int, config: FewConfig) -> None:
    """A product into the residual leaves half of a norm, which the next product completes."""
    tokens = min(config.tokens, 11)
    x, coded, expected = given(4096, inputs, tokens)
    norm = NextNorm(torch.rand(4096, device=CUDA).bfloat16(), 1e-5, torch.zeros(4096, dtype=torch.int32, device=CUDA))
    residual = torch.randn(tokens, 4096, device=CUDA).bfloat16()
    added = residual.float() + expected
    half = residual_linear(x, coded, None, residual, norm, config)
    assert worst_row(residual, added) < LIMIT
    _, following, _ = given(96, 4096, tokens)
    whole = (normed(added) * norm.weight.float()).bfloat16()
    exact = linear(whole, following, config=FewConfig(16, 4))
    assert worst_row(linear(half, following, config=FewConfig(16, 1, 4)), exact.float()) < 2e-2


def test_half_norm_of_odd_parts() -> None:
    """Sums of squares in parts that are no power of two."""
    x, coded, expected = given(96, 1024, 2)
    squares = torch.cat([x.float().pow(2).view(2, 8, 128).sum(2).t(), torch.zeros(5, 2, device=CUDA)])
    scale = torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-5)
    half = HalfNorm(x, squares.contiguous(), 1e-5)
    assert worst_row(linear(half, coded, config=FewConfig(8, 1)), expected * scale) < LIMIT


def test_inputs_of_many_sizes() -> None:
    """Some of them very large, some as small as can be, in both types."""
    sizes = torch.exp(torch.linspace(-12, 8, 1024, device=CUDA))
    for dtype, limit in ((torch.float16, 2e-3), (torch.bfloat16, LIMIT)):
        layout = w4_words(256, 1024, 128, CUDA, zeros=True)
        coded, x = coded_of(layout), (torch.randn(2, 1024, device=CUDA) * sizes).to(dtype)
        assert coded is not None
        assert worst_row(linear(x, coded, config=FewConfig(8, 1)), F.linear(x.float(), layout.dense())) < limit


def test_in_a_graph() -> None:
    """Replays read what the kernel before has left, though they begin before its end."""
    layout, begin = w4_words(4096, 4096, 128, CUDA, zeros=True), torch.randn(1, 4096, device=CUDA).bfloat16()
    coded, expected = coded_of(layout), begin
    assert coded is not None
    for _ in range(8):
        expected = (F.linear(expected.float(), layout.dense()).bfloat16() * 0.05).bfloat16()
    linear(begin, coded, config=FewConfig(8, 4))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = begin
        for _ in range(8):
            found = linear(found, coded, config=FewConfig(8, 4)) * 0.05
    for _ in range(50):
        graph.replay()
    assert worst_row(found, expected.float()) < 3e-2
