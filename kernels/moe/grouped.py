"""Products of sorted pairs with their experts' weights on tensor cores, and the weighted sum of each token's products.

Weights are the rows of the tiles, pairs the columns. An item's tiles lie side by side, so that what programs read at
the same time is in the L2 cache. The number of items is read from memory: programs beyond it end at once, or, where
the grid is that of the GPU, each takes tiles until there are no more. A column's sums depend on that column alone,
so the order of pairs changes no bit of any token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import TensorDescriptor, next_power_of_2, tl, triton
from pagebus.kernels.moe.activation import gate_tile
from pagebus.kernels.moe.launch.shapes import GroupConfig, Grouped
from pagebus.kernels.moe.routing import WIDE_GRID
from pagebus.kernels.moe.sorting import SortedPairs
from pagebus.kernels.moe.weights import ExpertWeights


@triton.jit
def _tile(
    tile, x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, items_ptr, stride_x, num_columns, size, alpha, limit,
    GATED: tl.constexpr, KIND: tl.constexpr, TOP_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of an item: parameters are those of `_grouped_kernel`."""
    row_tiles = tl.cdiv(num_columns, ROWS)
    item, begin = tile // row_tiles, tile % row_tiles * ROWS
    expert = tl.load(items_ptr + item * 4)
    first, count = tl.load(items_ptr + item * 4 + 1), tl.load(items_ptr + item * 4 + 2)
    place, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    present = place < count
    pair = tl.load(order_ptr + first + place, mask=present, other=0)
    source = pair // TOP_K if GATED else first + place
    inputs = x_ptr + source.to(tl.int64)[:, None] * stride_x + column[None, :]
    row = begin + tl.arange(0, ROWS)
    exists = row < num_columns
    row = tl.where(exists, row, 0)
    HALVES: tl.constexpr = 2 if GATED else 1
    first_row = expert * HALVES * num_columns
    if not TMA:
        weights = weight_ptr + (first_row.to(tl.int64) + row)[:, None] * size + column[None, :]
        distance = num_columns.to(tl.int64) * size
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    up = acc
    for k in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        inside = (column + k < size)[None, :]
        if EVEN_K:
            x = tl.load(inputs + k, mask=present[:, None], other=0.0)
        else:
            x = tl.load(inputs + k, mask=present[:, None] & inside, other=0.0)
        if TMA:
            w = weight_ptr.load([first_row + begin, k])
        elif EVEN_K and EVEN_N:
            w = tl.load(weights + k)
        else:
            w = tl.load(weights + k, mask=exists[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        if GATED:
            if TMA:
                w = weight_ptr.load([first_row + num_columns + begin, k])
            elif EVEN_K and EVEN_N:
                w = tl.load(weights + distance + k)
            else:
                w = tl.load(weights + distance + k, mask=exists[:, None] & inside, other=0.0)
            up = tl.dot(w, tl.trans(x), up, input_precision=PRECISION)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + first_row + row).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias_ptr + first_row + num_columns + row).to(tl.float32)[:, None]
    if GATED:
        # Without a sum right here, the assembler reads accumulators too early and runs the products one by one.
        acc, up = acc + 0.0, up + 0.0
        acc = gate_tile(acc, up, alpha, limit, KIND, out_ptr.dtype.element_ty)
    target = first + place if GATED else pair
    places = out_ptr + target.to(tl.int64)[None, :] * num_columns + row[:, None]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=exists[:, None] & present[None, :])


@triton.jit
def _grouped_kernel(
    x_ptr,  # [T, K] if GATED, else [P, K], sorted
    weight_ptr,  # [E, N, K], N = 2I if GATED; with TMA a descriptor of [E * N, K]
    bias_ptr,  # [E, N] or None
    out_ptr,  # [P, I], sorted, if GATED, else [P, N] by the pairs' numbers
    order_ptr,  # [P]
    items_ptr,  # [I, 4]
    num_items_ptr,  # [1]
    stride_x,
    num_columns,  # I if GATED, else N
    size,  # K
    alpha,
    limit,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,  # all rows of all tiles exist
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # pairs of an item
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(num_items_ptr) * tl.cdiv(num_columns, ROWS)
    tile = tl.program_id(0)
    if PERSISTENT:
        for each in tl.range(tile, total, tl.num_programs(0), num_stages=1):
            _tile(
                each, x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, items_ptr, stride_x, num_columns, size, alpha,
                limit, GATED, KIND, TOP_K, EVEN_K, EVEN_N, ROWS, BLOCK_M, BLOCK_K, STAGES, TMA, PRECISION,
            )  # fmt: skip
    elif tile < total:
        _tile(
            tile, x_ptr, weight_ptr, bias_ptr, out_ptr, order_ptr, items_ptr, stride_x, num_columns, size, alpha,
            limit, GATED, KIND, TOP_K, EVEN_K, EVEN_N, ROWS, BLOCK_M, BLOCK_K, STAGES, TMA, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    products_ptr,  # [T, TOP_K, N]
    weights_ptr,  # [T, TOP_K] float32
    experts_ptr,  # [T, TOP_K]
    out_ptr,  # [T, N]
    num_tokens,
    SIZE: tl.constexpr,  # N
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = (token < num_tokens)[:, None] & (column < SIZE)[None, :]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        chosen = tl.load(experts_ptr + pair, mask=token < num_tokens, other=-1) >= 0
        weight = tl.load(weights_ptr + pair, mask=chosen, other=0.0)
        place = products_ptr + pair[:, None] * SIZE + column[None, :]
        acc += tl.load(place, mask=mask & chosen[:, None], other=0.0).to(tl.float32) * weight[:, None]
    tl.store(out_ptr + token[:, None] * SIZE + column[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


def combine_reference(products: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """products [T, k, N] and weights [T, k] float32 -> their weighted sum [T, N], choice by choice in float32; those of
    expert -1 are left out."""
    total = torch.zeros(len(products), products.shape[2], dtype=torch.float32, device=products.device)
    for choice in range(products.shape[1]):
        product = products[:, choice].float() * weights[:, choice, None]
        total += product.masked_fill((experts[:, choice] < 0).unsqueeze(1), 0.0)
    return total.to(products.dtype)


def combine(products: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """products [T, k, N] and weights [T, k] float32 -> their weighted sum [T, N], choice by choice in float32; those of
    expert -1 are left out."""
    num_tokens, top_k, size = products.shape
    assert weights.shape == experts.shape == (num_tokens, top_k)
    assert products.is_contiguous()
    assert weights.is_contiguous()
    assert experts.is_contiguous()
    out = torch.empty((num_tokens, size), dtype=products.dtype, device=products.device)
    block, block_rows = min(512, next_power_of_2(size)), 4 if num_tokens > WIDE_GRID else 1
    _combine_kernel[(-(-num_tokens // block_rows) * -(-size // block),)](
        products, weights, experts, out, num_tokens,
        SIZE=size, TOP_K=top_k, BLOCK_ROWS=block_rows, BLOCK=block, num_warps=4 if block_rows > 1 else 2,
        **pdl(products.device),
    )  # fmt: skip
    return out


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, pairs: SortedPairs,
    layer: ExpertWeights, top_k: int, config: GroupConfig, *, gated: bool,
) -> torch.Tensor:  # fmt: skip
    """One of both products, into ``out`` [P, columns]."""
    (_, num_rows, size), columns = weight.shape, out.shape[1]
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert len(weight) * num_rows < 2**31
    source = TensorDescriptor.from_tensor(weight.view(-1, size), [config.rows, config.depth]) if config.tma else weight
    target, tiles = target_of(x.device), len(pairs.items) * -(-columns // config.rows)
    processors = 1 if target is None else target.num_multiprocessors
    _grouped_kernel[(min(tiles, config.programs * processors) if config.programs else tiles,)](
        x, source, bias, out, pairs.order, pairs.items, pairs.num_items, x.stride(0), columns, size, layer.gate.alpha,
        layer.gate.limit,
        GATED=gated, KIND=str(layer.gate.kind), TOP_K=top_k, EVEN_K=size % config.depth == 0,
        EVEN_N=columns % config.rows == 0, ROWS=config.rows, BLOCK_M=pairs.tokens, BLOCK_K=config.depth,
        STAGES=config.stages, TMA=config.tma, PERSISTENT=config.programs > 0, PRECISION="ieee",
        num_warps=config.warps, **pdl(x.device),
    )  # fmt: skip
    return out


def grouped_pairs(
    layer: ExpertWeights, top_k: int, config: Grouped
) -> tuple[Callable[[torch.Tensor, torch.Tensor, SortedPairs], torch.Tensor], ...]:
    """Both products without what fuses them: x [P, K], sorted, into [P, N], where the pairs' order says."""
    return tuple(
        partial(_left_alone, weight, bias, layer, top_k, config.down)
        for weight, bias in ((layer.gate_up, layer.gate_up_bias), (layer.down, layer.down_bias))
    )


def _left_alone(
    weight: torch.Tensor, bias: torch.Tensor | None, layer: ExpertWeights, top_k: int, config: GroupConfig,
    x: torch.Tensor, out: torch.Tensor, pairs: SortedPairs,
) -> torch.Tensor:  # fmt: skip
    return _launch(x, weight, bias, out, pairs, layer, top_k, config, gated=False)


def grouped_experts(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights, pairs: SortedPairs,
    gate_up: GroupConfig, down: GroupConfig,
) -> torch.Tensor:  # fmt: skip
    """`moe_experts` of tokens whose ``pairs`` are sorted."""
    (num_tokens, top_k), (_, num_rows, width) = experts.shape, layer.down.shape
    hidden = torch.empty((experts.numel(), width), dtype=x.dtype, device=x.device)
    products = torch.empty((experts.numel(), num_rows), dtype=x.dtype, device=x.device)
    _launch(x, layer.gate_up, layer.gate_up_bias, hidden, pairs, layer, top_k, gate_up, gated=True)
    _launch(hidden, layer.down, layer.down_bias, products, pairs, layer, top_k, down, gated=False)
    return combine(products.view(num_tokens, top_k, num_rows), weights, experts)
