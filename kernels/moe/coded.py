"""Products of pairs with their experts' quantized weights on tensor cores, for any number of tokens.

The loop over K is that of dense products (`pagebus.kernels.coded`): numbers become 16 bits in registers and activations
stay in 16 bits, or both are multiplied in 8 bits. Sums are float32. Pairs are sorted into items as for
`pagebus.kernels.moe.grouped`; few pairs are items of one pair each, in the order in which they come. Rows of gate and
up that belong together are in one tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from pagebus.kernels.coded.rounded_tiles import rounded_sum
from pagebus.kernels.coded.tiles import coded_sum
from pagebus.kernels.coded.weights import Coded, tile_operands
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.linear.epilogue import split_gated, tile_rows
from pagebus.kernels.linear.skinny_gemm import TileConfig
from pagebus.kernels.moe.activation import Gate, gate_tile
from pagebus.kernels.moe.grouped import combine
from pagebus.kernels.moe.ring_pairs import ring_pairs
from pagebus.kernels.moe.sorting import SortedPairs, sort_pairs
from pagebus.kernels.specialized.hopper_few import FewConfig


class CodedConfig(NamedTuple):
    """Launch shapes of both products. Tiles are as many pairs wide as an item has at most; ``ordered``: pairs are
    sorted, else each is an item, whose words may come through a ring."""

    gate_up: TileConfig | FewConfig
    down: TileConfig | FewConfig
    ordered: bool


class CodedExperts(NamedTuple):
    """As `ExpertWeights`, of quantized weights [E, 2I, H] and [E, H, I] whose columns are in their own order."""

    gate_up: Coded
    down: Coded
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate: Gate


@triton.jit
def _tile(
    item, tile, x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, items_ptr, stride_x, num_rows, size, stride_weights,
    stride_scales, alpha, limit, scale_ptr, zero_ptr, low_ptr, whole_ptr, table_ptr, stride_scale, stride_group,
    tokens_ptr, CODE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, NATIVE: tl.constexpr,
    WHOLE: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, TOP_K: tl.constexpr, EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of an item: parameters are those of `_coded_kernel`."""
    place = tl.arange(0, BLOCK_M)
    if order_ptr is None:
        expert, first = tl.load(items_ptr + item).to(tl.int64), item
        present = place < 1
        pair = first + place
    else:
        expert, first = tl.load(items_ptr + item * 4).to(tl.int64), tl.load(items_ptr + item * 4 + 1)
        present = place < tl.load(items_ptr + item * 4 + 2)
        pair = tl.load(order_ptr + first + place, mask=present, other=0)
    source = pair // TOP_K if GATED else first + place
    row, exists = tile_rows(tile, num_rows, ROWS, ROWS, GATED)
    scale_ptr += expert * stride_scales
    if zero_ptr is not None:
        zero_ptr += expert * stride_scales
    if low_ptr is not None:
        low_ptr += expert * stride_scales
    if whole_ptr is not None:
        whole_ptr += expert * num_rows
    acc, source, exists = tl.zeros((ROWS, BLOCK_M), tl.float32), source.to(tl.int64), exists[:, None]
    if tokens_ptr is not None:
        groups = tl.cdiv(size, WIDTH) if WIDTH else 1
        acc = rounded_sum(
            acc, x_ptr + source[:, None] * stride_x, tokens_ptr + source[None, :] * groups, present,
            weight_ptr + expert * stride_weights, scale_ptr, stride_scale, stride_group, row, exists, 0, size, size,
            HEIGHT, WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES, WHOLE,
        )  # fmt: skip
    else:
        acc = coded_sum(
            acc, x_ptr + source[:, None] * stride_x, present[:, None], weight_ptr + expert * stride_weights, scale_ptr,
            zero_ptr, low_ptr, whole_ptr, table_ptr, stride_scale, stride_group, row, exists, 0, size, size, CODE,
            HEIGHT, WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * num_rows + row).to(tl.float32)[:, None]
    HALVES: tl.constexpr = 2 if GATED else 1
    if GATED:
        acc, up = split_gated(acc)
        acc = gate_tile(acc, up, alpha, limit, KIND, out_ptr.dtype.element_ty)
    num_columns = num_rows // HALVES
    column = tile * (ROWS // HALVES) + tl.arange(0, ROWS // HALVES)
    target = first + place if GATED else pair
    places = out_ptr + target.to(tl.int64)[None, :] * num_columns + column[:, None]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=(column < num_columns)[:, None] & present[None, :])


@triton.jit
def _coded_kernel(
    x_ptr,  # [T, K] if GATED, else [P, K] in the order of items
    weight_ptr,  # [E, N, K] or words, N = 2I if GATED
    bias_ptr,  # [E, N] or None
    out_ptr,  # [P, I] in the order of items if GATED, else [P, N] by the pairs' numbers
    order_ptr,  # [P]; None: each pair is an item
    items_ptr,  # [I, 4]; without an order each pair's expert [P]
    num_items_ptr,  # [1]; without an order None
    stride_x,
    num_rows,  # N
    size,  # K
    stride_weights,  # of experts
    stride_scales,  # of experts
    alpha,
    limit,
    scale_ptr,  # as `Coded` has them
    zero_ptr,
    low_ptr,
    whole_ptr,
    table_ptr,
    stride_scale,
    stride_group,
    tokens_ptr,  # None, or the scales of x, which is of the weights' 8 bits: [T] or [T, ceil(K / WIDTH)]
    CODE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,  # weights and x are int8
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,  # all rows of all tiles exist
    ROWS: tl.constexpr,  # of weights: if GATED, half of them are gates
    BLOCK_M: tl.constexpr,  # pairs of an item
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles = tl.cdiv(num_rows, ROWS)
    item, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    there = tl.load(items_ptr + item) >= 0 if order_ptr is None else item < tl.load(num_items_ptr)
    if there:
        _tile(
            item, tile, x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, items_ptr, stride_x, num_rows, size,
            stride_weights, stride_scales, alpha, limit, scale_ptr, zero_ptr, low_ptr, whole_ptr, table_ptr,
            stride_scale, stride_group, tokens_ptr, CODE, HEIGHT, WIDTH, NATIVE, WHOLE, GATED, KIND, TOP_K, EVEN_K,
            EVEN_N, ROWS, BLOCK_M, BLOCK_K, STAGES, PRECISION,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Items:
    """Which pairs there are: sorted, or as the [T, k] ``experts`` come."""

    experts: torch.Tensor
    pairs: SortedPairs | None

    @property
    def arguments(self) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
        """Order, items, and how many there are."""
        if self.pairs is None:
            return None, self.experts, None
        return self.pairs.order, self.pairs.items, self.pairs.num_items

    def __len__(self) -> int:
        return self.experts.numel() if self.pairs is None else len(self.pairs.items)


def _launch(
    x: torch.Tensor, weight: Coded, bias: torch.Tensor | None, out: torch.Tensor, items: _Items, gate: Gate,
    config: TileConfig | FewConfig, *, gated: bool,
) -> torch.Tensor:  # fmt: skip
    """One of both products, into ``out`` [P, columns]."""
    if isinstance(config, FewConfig):
        assert items.pairs is None
        return ring_pairs(x, weight, bias, out, items.experts, gate, config, gated=gated)
    size, num_rows = weight.inputs, weight.rows
    x, numbers, tokens, meaning = tile_operands(x, weight, rounded=config.rounded)
    assert x.stride(1) == 1
    for part in (weight.numbers, weight.scale, weight.zero, weight.low, weight.whole):
        assert part is None or part.is_contiguous()
    _coded_kernel[(len(items) * config.tiles(num_rows),)](
        x, numbers, bias, out, *items.arguments, x.stride(0), num_rows, size, weight.numbers.stride(0),
        weight.scale.stride(0), gate.alpha, gate.limit,
        **meaning, tokens_ptr=tokens, WHOLE=numbers.dtype == torch.int8,
        GATED=gated, KIND=str(gate.kind), TOP_K=items.experts.shape[1], EVEN_K=size % config.depth == 0,
        EVEN_N=num_rows % config.rows == 0, ROWS=config.rows, BLOCK_M=config.tokens, BLOCK_K=config.depth,
        STAGES=config.stages, PRECISION="ieee", num_warps=config.warps, **pdl(x.device),
    )  # fmt: skip
    return out


def coded_pairs(
    layer: CodedExperts, experts: torch.Tensor, config: CodedConfig
) -> tuple[Callable[[torch.Tensor, torch.Tensor, SortedPairs], torch.Tensor], ...]:
    """Both products without what fuses them: x [P, K], sorted, into [P, N], where the pairs' order says."""
    return tuple(
        partial(_left_alone, weight, bias, layer.gate, experts, tile)
        for weight, bias, tile in (
            (layer.gate_up, layer.gate_up_bias, config.gate_up), (layer.down, layer.down_bias, config.down),
        )
    )  # fmt: skip


def _left_alone(
    weight: Coded, bias: torch.Tensor | None, gate: Gate, experts: torch.Tensor, config: TileConfig | FewConfig,
    x: torch.Tensor, out: torch.Tensor, pairs: SortedPairs,
) -> torch.Tensor:  # fmt: skip
    return _launch(x, weight, bias, out, _Items(experts, pairs), gate, config, gated=False)


def coded_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: CodedExperts, config: CodedConfig
) -> torch.Tensor:
    """x [T, H], weights [T, k] float32, experts [T, k] int32 (-1: none) -> the weighted sum of its experts' products
    for each token, [T, H]; of a token without experts 0."""
    (num_tokens, top_k), count = experts.shape, experts.numel()
    width, num_rows = layer.down.inputs, layer.down.rows
    pairs = sort_pairs(experts, len(layer.down.numbers), config.gate_up.tokens) if config.ordered else None
    items = _Items(experts, pairs)
    hidden = torch.empty((count, width), dtype=x.dtype, device=x.device)
    products = torch.empty((count, num_rows), dtype=x.dtype, device=x.device)
    _launch(x, layer.gate_up, layer.gate_up_bias, hidden, items, layer.gate, config.gate_up, gated=True)
    _launch(hidden, layer.down, layer.down_bias, products, items, layer.gate, config.down, gated=False)
    return combine(products.view(num_tokens, top_k, num_rows), weights, experts)
