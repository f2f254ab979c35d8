"""The library's products by an algorithm that is chosen here, against those by the one that it chooses."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from pagebus.kernels.common.target import target_of
from pagebus.kernels.cublas.binding import Proposal, tile_of
from pagebus.kernels.cublas.plan import Plan, Shape
from pagebus.kernels.cublas.product import library_linear, library_sums, planned, set_up_library
from pagebus.kernels.cublas.tiles import MADE, TILES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="chooses on Hopper alone"
    ),
]
SIZES = [(256, 28672, 1024), (192, 35840, 512), (128, 28672, 512), (256, 37888, 1024), (203, 22016, 1024)]
"""Tokens, rows and inputs of products whose rounds decide."""
CUT = [(256, 5120, 8192, 2), (192, 5120, 8192, 4), (256, 4096, 8192, 2), (101, 3584, 8192, 2)]
"""The same with the parts of K."""


def operands(tokens: int, rows: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, inputs, dtype=dtype, device="cuda", generator=generator)
    weight = torch.randn(rows, inputs, dtype=dtype, device="cuda", generator=generator) * inputs**-0.5
    return x, weight


def chosen(x: torch.Tensor, weight: torch.Tensor, parts: int = 1) -> Proposal | None:
    target = target_of(x.device)
    assert target is not None
    shape = Shape(len(x), len(weight), x.shape[1], x.stride(0), x.dtype, 0, parts=parts)
    found = planned(shape, target.num_multiprocessors)
    return None if found is None else found[1]


def launched(work: Callable[[], object]) -> list[str]:
    """The names of kernels, and of what clears memory."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return [event.key for event in profiler.key_averages()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_equal_the_librarys_own(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = operands(*sizes, dtype)
    bias = torch.randn(len(weight), dtype=dtype, device="cuda")
    torch.testing.assert_close(library_linear(x, weight), F.linear(x, weight))
    for _ in range(2):  # the second bias is another
        torch.testing.assert_close(library_linear(x, weight, bias), F.linear(x, weight, bias))
        bias = bias * 2


@pytest.mark.parametrize("sizes", CUT, ids=str)
def test_sums_of_parts(sizes: tuple[int, int, int, int]) -> None:
    tokens, rows, inputs, parts = sizes
    x, weight = operands(tokens, rows, inputs, torch.bfloat16)
    found = library_sums(x, weight, torch.full((parts, len(x), len(weight)), torch.nan, device="cuda"))
    for part, of_x, of_weight in zip(found, x.chunk(parts, 1), weight.chunk(parts, 1), strict=True):
        expected = torch.mm(of_x, of_weight.t(), out_dtype=torch.float32)
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-4)


def test_a_tile_that_the_library_does_not_propose() -> None:
    x, weight = operands(256, 5120, 8192, torch.bfloat16)
    found = chosen(x, weight, 2)
    assert found is not None
    assert tile_of(found) == MADE
    names = launched(lambda: library_sums(x, weight, torch.empty(2, 256, 5120, device="cuda")))
    assert any("_160x128_" in name for name in names), names
    assert not [name for name in names if "memset" in name.lower()], names


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_numbers_name_the_tiles_that_are_launched(sizes: tuple[int, int, int]) -> None:
    x, weight = operands(*sizes, torch.bfloat16)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device="cuda")
    plan = Plan(Shape(*sizes, x.stride(0), x.dtype, 0))
    known = [proposal for proposal in plan.proposals if tile_of(proposal) in TILES]
    assert known
    for proposal in known:
        tile = TILES[tile_of(proposal)]
        names = launched(lambda algorithm=proposal: plan.launch(algorithm, x, weight, out))  # type: ignore[misc]
        assert any(f"_{tile.rows}x{tile.tokens}_" in name for name in names), (tile, names)
        assert not [name for name in names if re.search("memset", name, re.IGNORECASE)], names


def test_rows_of_a_wider_matrix() -> None:
    x, weight = operands(256, 28672, 1024, torch.bfloat16)
    wide = torch.cat([x, x], dim=1)[:, 512:1536]
    assert chosen(wide, weight) is not None
    torch.testing.assert_close(library_linear(wide, weight), F.linear(wide, weight))


def test_odd_addresses_are_left_to_the_library() -> None:
    x, weight = operands(256, 28672, 1032, torch.bfloat16)
    x, weight = x[:, 3:1027], weight[:, 3:1027]
    torch.testing.assert_close(library_linear(x, weight), F.linear(x, weight))


def test_a_graph_replays_what_was_launched() -> None:
    x, weight = operands(256, 28672, 1024, torch.bfloat16)
    library_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = library_linear(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(out, F.linear(x, weight))


def test_a_graph_of_a_size_that_was_never_launched() -> None:
    """As most sizes of an engine."""
    x, weight = operands(248, 28672, 1024, torch.bfloat16)
    set_up_library(x.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = library_linear(x, weight)
    graph.replay()
    torch.testing.assert_close(out, F.linear(x, weight))


def test_what_the_library_holds_for_a_plan_goes_with_it() -> None:
    plan = Plan(Shape(256, 4096, 1024, 1024, torch.bfloat16, 0))
    assert plan.proposals
    del plan
