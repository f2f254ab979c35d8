"""Skinny products at the shapes of real models, on the GPU; chains of kernels under programmatic dependent launch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import pagebus.kernels.linear.linear
from pagebus.kernels.common import pdl
from pagebus.kernels.layers.norm import HalfNorm, NextNorm, add_rms_norm, rms_norm
from pagebus.kernels.linear.dispatch import LinearChoice, choose, choose_residual_product
from pagebus.kernels.linear.library_parts import LibraryConfig
from pagebus.kernels.linear.linear import (
    gated_linear,
    gated_linear_invariant,
    linear,
    linear_invariant,
    partial_linear,
    partial_linear_invariant,
    residual_linear,
)
from pagebus.kernels.linear.shapes import Config
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.specialized.hopper_gemm import SpecializedConfig
from pagebus.kernels.specialized.hopper_prompts import PromptConfig
from tests.gpu.errors import worst_row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHAPES = {  # N, K
    "llama8b qkv": (6144, 4096),
    "llama8b o": (4096, 4096),
    "llama8b gate_up": (28672, 4096),
    "llama8b down": (4096, 14336),
    "llama8b head": (128256, 4096),
    "qwen06b qkv": (4096, 1024),
    "qwen06b o": (1024, 2048),
    "qwen06b gate_up": (6144, 1024),
    "qwen06b down": (1024, 3072),
    "qwen06b head": (151936, 1024),
    "gptoss20b qkv": (5120, 2880),
    "gptoss20b o": (2880, 4096),
    "gptoss20b router": (32, 2880),
    "odd": (1234, 1000),
    "qwen7b down": (3584, 18944),
    "llama1b o": (2048, 2048),
    "gpt-oss qkv": (5120, 2880),
    "gemma12b gate_up": (30720, 3840),
}
TOKENS = (1, 2, 3, 8, 13, 16, 31, 64, 100, 128, 200, 256, 300)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def poison(*shape: int, dtype: torch.dtype) -> None:
    """Leave not-a-number where the next tensor of this size will be."""
    torch.full(shape, math.nan, dtype=dtype, device="cuda")


def weights(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, size, dtype=dtype, device="cuda") / size**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape: str, dtype: torch.dtype) -> None:
    """Every form and number of tokens, with whatever kernel was chosen for it."""
    rows, size = SHAPES[shape]
    weight, limit = weights(rows, size, dtype), {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    bias = torch.randn(rows, dtype=dtype, device="cuda")
    for tokens in TOKENS:
        x = torch.randn(tokens, size, dtype=dtype, device="cuda")
        expected = F.linear(x.float(), weight.float())
        poison(tokens, rows, dtype=dtype)
        assert worst_row(linear(x, weight), expected) < limit
        poison(tokens, rows, dtype=torch.float32)
        assert worst_row(linear(x, weight, None, torch.float32), expected) < limit
        assert worst_row(linear(x, weight, bias), expected + bias.float()) < limit
        parts = partial_linear(x, weight)
        assert worst_row(parts if parts.dim() == 2 else parts.sum(0), expected) < limit
        gate, up = expected.chunk(2, dim=1)
        poison(tokens, rows // 2, dtype=dtype)
        assert worst_row(gated_linear(x, weight), F.silu(gate) * up) < 2 * limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_tokens(dtype: torch.dtype) -> None:
    """Beyond the buckets of own kernels the product goes into the residual by itself, unless that is float32; a bias is
    never left out."""
    rows, size = SHAPES["llama8b o"]
    weight, limit = weights(rows, size, dtype), {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
    bias = torch.randn(rows, dtype=dtype, device="cuda")
    for tokens in (300, 1000, 4096, 9000):
        x = torch.randn(tokens, size, dtype=dtype, device="cuda")
        expected = F.linear(x.float(), weight.float())
        for call in (linear, partial_linear):
            assert worst_row(call(x, weight), expected) < limit
            assert worst_row(call(x, weight, bias), expected + bias.float()) < limit
        residual = torch.randn(tokens, rows, dtype=dtype, device="cuda")
        added = residual.clone()
        rest = partial_linear(x, weight, None, added)
        assert (rest is None) == (dtype != torch.float32)
        assert worst_row(added if rest is None else added + rest, expected + residual.float()) < limit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("config", "rows", "size"),
    [(SpecializedConfig(224), 2468, 1152), (SpecializedConfig(112), 1234, 4096), (SpecializedConfig(48), 304, 128),
     (SpecializedConfig(256), 151936, 1024), (SpecializedConfig(96, 9), 1234, 1152),
     (SpecializedConfig(64, 2), 70, 256)],
)  # fmt: skip
def test_specialized(config: SpecializedConfig, rows: int, size: int, dtype: torch.dtype) -> None:
    """Warps that load and warps that multiply, in every form: tiles over the edges, one stage, many tiles for each."""
    weight, limit = weights(rows, size, dtype), {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    bias = torch.randn(rows, dtype=dtype, device="cuda")
    for tokens in (1, 65, 128, 200, 500):
        x = torch.randn(tokens, size, dtype=dtype, device="cuda")
        expected = F.linear(x.float(), weight.float())
        if config.splits > 1:
            poison(config.splits, tokens, rows, dtype=torch.float32)
            assert worst_row(partial_linear(x, weight, config=config).sum(0), expected) < 1e-4
            continue
        poison(tokens, rows, dtype=dtype)
        assert worst_row(linear(x, weight, bias, config=config), expected + bias.float()) < limit
        poison(tokens, rows, dtype=torch.float32)
        assert worst_row(linear(x, weight, None, torch.float32, config=config), expected) < 1e-4
        for b in (None, bias):
            gate, up = (expected if b is None else expected + b.float()).chunk(2, dim=1)
            poison(tokens, rows // 2, dtype=dtype)
            assert worst_row(gated_linear(x, weight, b, config=config), F.silu(gate) * up) < 2 * limit


@pytest.mark.parametrize(
    ("config", "rows", "size"),
    [(TileConfig(128, 16, 128, 4, 4, 4, tma=True), 4096, 13696),
     (TileConfig(64, 16, 256, 3, 4, 4, tma=True), 700, 8960), (TileConfig(64, 16, 128, 4, 4, 2, tma=True), 300, 384),
     (TileConfig(64, 16, 64, 5, 4, 4, tma=True), 130, 456)],
)  # fmt: skip
def test_uneven_parts(config: TileConfig, rows: int, size: int) -> None:
    """K in parts of which the last has fewer columns, or begins where whole depths end; prefetched or not."""
    weight, norm = weights(rows, size, torch.bfloat16), next_norm(rows)
    for tokens in (1, 16, 40, 130):
        x = torch.randn(tokens, size, dtype=torch.bfloat16, device="cuda")
        expected = F.linear(x.float(), weight.float())
        poison(config.splits, tokens, rows, dtype=torch.float32)
        assert worst_row(partial_linear(x, weight, config=config).sum(0), expected) < 1e-4
        residual = torch.randn(tokens, rows, dtype=torch.bfloat16, device="cuda")
        wanted = residual.float() + expected
        residual_linear(x, weight, None, residual, norm, config)
        assert worst_row(residual, wanted) < 6e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(2468, 1152), (26000, 64), (70, 4096)])
def test_prompts(rows: int, size: int, dtype: torch.dtype) -> None:
    """Tiles over the edges, many tiles for each program, fewer inputs than stages; whole bands and parts of them."""
    weight, limit = weights(rows, size, dtype), {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    bias = torch.randn(rows, dtype=dtype, device="cuda")
    for tokens, config in itertools.product((1, 200, 256, 1100, 2600), (PromptConfig(2), PromptConfig(8))):
        x = torch.randn(tokens, size, dtype=dtype, device="cuda")
        expected = F.linear(x.float(), weight.float())
        for b in (None, bias):
            gate, up = (expected if b is None else expected + b.float()).chunk(2, dim=1)
            poison(tokens, rows // 2, dtype=dtype)
            assert worst_row(gated_linear(x, weight, b, config=config), F.silu(gate) * up) < 2 * limit
        activated = F.gelu(expected[:, : rows // 2], approximate="tanh") * expected[:, rows // 2 :]
        assert worst_row(gated_linear(x, weight, None, config=config, act="gelu_tanh"), activated) < 2 * limit


def next_norm(size: int, dtype: torch.dtype = torch.bfloat16) -> NextNorm:
    """A norm of random weights."""
    counters = torch.zeros(size, dtype=torch.int32, device="cuda")
    return NextNorm(torch.rand(size, dtype=dtype, device="cuda") + 0.5, 1e-5, counters)


@pytest.mark.parametrize("shape", ["llama8b o", "llama8b down", "qwen06b o", "qwen06b down"])
def test_residual_linear(shape: str) -> None:
    """Added to the residual with whatever kernel was chosen, and with splits; products complete the norm; the bits are
    the same in every run, whoever comes last."""
    rows, size = SHAPES[shape]
    bias, after = torch.randn(rows, device="cuda").bfloat16(), next_norm(rows)
    weight, following = weights(rows, size, torch.bfloat16), weights(640, rows, torch.bfloat16)
    for tokens in (count for count in TOKENS if count <= 64):
        x, given = (torch.randn(tokens, width, device="cuda").bfloat16() for width in (size, rows))
        split = TileConfig(64, max(16, 1 << (tokens - 1).bit_length()), 128, 4, 4, 4, True)
        for config in {split, choose("residual", x, weight) or split}:
            check_residual(x, weight, bias, given, after, following, config)


def check_residual(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, given: torch.Tensor, after: NextNorm,
    following: torch.Tensor, config: Config,
) -> None:  # fmt: skip
    expected = given.float() + F.linear(x.float(), weight.float(), bias.float())
    normed = expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5) * after.weight.float()
    bits = []
    for _ in range(20):
        residual = given.clone()
        poison(*given.shape, dtype=torch.bfloat16)
        poison(4, *given.shape, dtype=torch.float32)
        half = residual_linear(x, weight, bias, residual, after, config)
        bits.append((residual, half.x, half.squares))
    assert all(torch.equal(a, b) for one in bits for a, b in zip(one, bits[0], strict=True))
    assert not after.counters.any()
    assert worst_row(residual, expected) < 6e-3
    assert worst_row(linear(half, following), F.linear(normed, following.float())) < 1.2e-2
    gate, up = F.linear(normed, following.float()).chunk(2, dim=1)
    assert worst_row(gated_linear(half, following), F.silu(gate) * up) < 2.4e-2


class Chain:
    """What surrounds attention in a few layers: norms, a product, a gated one, products into the residual."""

    def __init__(self, hidden: int, inner: int, layers: int = 4) -> None:
        bf16 = torch.bfloat16
        self.layers = [
            (weights(hidden, hidden, bf16), weights(2 * inner, hidden, bf16), weights(hidden, inner, bf16))
            for _ in range(layers)
        ]
        self.norm = next_norm(hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        residual = x.clone()
        hidden: torch.Tensor | HalfNorm = rms_norm(residual, *self.norm[:2])
        for out, gate_up, down in self.layers:
            hidden = self._into(residual, linear(hidden, out), out)
            hidden = self._into(residual, gated_linear(hidden, gate_up), down)
        return linear(hidden, out)

    def _into(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | HalfNorm:
        added = partial_linear(x, weight, None, residual, self.norm)
        return added if isinstance(added, HalfNorm) else add_rms_norm(added, residual, *self.norm[:2])


def captured(
    call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of call(x), and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(x)
        with torch.cuda.graph(graph, stream=stream):
            out = call(x)
    torch.cuda.synchronize()
    return graph, out


@pytest.mark.parametrize("sizes", [(4096, 14336), (1024, 3072)])
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 64, 128, 256])
def test_dependent_launch(tokens: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that start early compute the same bits as kernels that start one after the other, 200 times."""
    chain = Chain(*sizes)
    inputs = [torch.randn(tokens, sizes[0], device="cuda").bfloat16() for _ in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(pdl, "_supported", lambda _device: False)
        expected = [chain(x) for x in inputs]
    x = inputs[0].clone()
    graph, out = captured(chain, x)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(200):
        x.copy_(inputs[number % 5])
        graph.replay()
        wrong += (out != expected[number % 5]).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("tokens", [1, 8, 16])
def test_half_norms(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins with halves of norms and completes them computes what whole norms do."""
    chain, x = Chain(4096, 14336), torch.randn(tokens, 4096, device="cuda").bfloat16()
    halves = chain(x)

    def choose_whole_norms(*given: Any, **words: Any) -> LinearChoice:
        return choose_residual_product(*given, **words | {"norms": False})

    monkeypatch.setattr(pagebus.kernels.linear.linear, "choose_residual_product", choose_whole_norms)
    assert 0 < worst_row(halves, chain(x)) < 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", ["llama8b qkv", "llama8b down", "qwen06b gate_up", "odd"])
def test_invariant(shape: str, dtype: torch.dtype) -> None:
    """Each token's bits are the same alone, in any batch and in a long prompt."""
    rows, size = SHAPES[shape]
    weight, most = weights(rows, size, dtype), 300 if dtype == torch.float32 else 3000
    x = torch.randn(most, size, dtype=dtype, device="cuda")
    for call in (linear_invariant, gated_linear_invariant, partial_linear_invariant):
        whole = call(x, weight)
        assert whole.isfinite().all()
        for count in (1, 2, 7, 16, 17, 33, 64, 65, 129, 256):
            start = 13 * count % (most - count)
            assert torch.equal(call(x[start : start + count], weight), whole[start : start + count]), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_by_the_library(dtype: torch.dtype) -> None:
    """Sums of parts of K add up to the product, also of rows that are a view; with a bias nothing is cut."""
    rows, size = SHAPES["llama8b o"]
    weight, limit = weights(rows, size, dtype), {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    bias = torch.randn(rows, dtype=dtype, device="cuda")
    for tokens, splits in itertools.product((65, 200, 256), (2, 4)):
        x = torch.randn(tokens, 2 * size, dtype=dtype, device="cuda")[:, size:]
        expected = F.linear(x.float(), weight.float())
        poison(splits, tokens, rows, dtype=torch.float32)
        parts = partial_linear(x, weight, config=LibraryConfig(splits))
        assert isinstance(parts, torch.Tensor)
        assert parts.shape == (splits, tokens, rows)
        assert worst_row(parts.sum(0), expected) < limit
        whole = partial_linear(x.contiguous(), weight, bias, config=LibraryConfig(splits))
        assert isinstance(whole, torch.Tensor)
        assert worst_row(whole, expected + bias.float()) < limit


def test_rows_in_two_products_by_the_library() -> None:
    """Gates and what they multiply, wherever the cut is; with a bias all rows at once."""
    rows, size = SHAPES["llama8b gate_up"]
    weight, bias = weights(rows, size, torch.bfloat16), torch.randn(rows, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(200, size, dtype=torch.bfloat16, device="cuda")
    for first, each in itertools.product((12672, 25344), (None, bias)):
        gate, up = F.linear(x.float(), weight.float(), None if each is None else each.float()).chunk(2, dim=1)
        poison(200, rows, dtype=torch.bfloat16)
        found = gated_linear(x, weight, each, config=LibraryConfig(first=first))
        assert worst_row(found, F.silu(gate) * up) < 12e-3
