"""Experts of very few tokens, without sorting: every pair of a token and an expert reads that expert's weights itself.

Reading weights at the speed of the memory is all that counts, so these are no products of matrices: a program has some
rows, and adds up in float32. The second product's programs have rows of one token each and go through its experts in
order, so the weighted sum needs neither atomics nor a kernel of its own.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.linear.epilogue import prefetch_rows
from pagebus.kernels.moe.activation import gate_tile
from pagebus.kernels.moe.launch.shapes import PairConfig
from pagebus.kernels.moe.weights import ExpertWeights


@triton.jit
def _pair_gate_up_kernel(
    x_ptr,  # [T, K]
    weight_ptr,  # [E, 2 * I, K]
    bias_ptr,  # [E, 2 * I] or None
    experts_ptr,  # [P]
    hidden_ptr,  # [P, I]
    stride_x,
    num_columns,  # I
    size,  # K
    alpha,
    limit,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, pair = tl.program_id(0), tl.program_id(1)
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    exists = row < num_columns
    row = tl.where(exists, row, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: the next kernel reads experts before it waits
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert < 0:
        return
    gates = weight_ptr + (expert * 2 * num_columns + row)[:, None] * size + column[None, :]
    ups = gates + num_columns.to(tl.int64) * size
    inputs = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x + column
    gate = tl.zeros((ROWS, BLOCK_K), tl.float32)
    up = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for k in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x, g, u = tl.load(inputs + k), tl.load(gates + k), tl.load(ups + k)
        else:
            inside = column + k < size
            x = tl.load(inputs + k, mask=inside, other=0.0)
            g = tl.load(gates + k, mask=inside[None, :], other=0.0)
            u = tl.load(ups + k, mask=inside[None, :], other=0.0)
        wide = x.to(tl.float32)[None, :]
        gate += g.to(tl.float32) * wide
        up += u.to(tl.float32) * wide
    gate_sum, up_sum = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if bias_ptr is not None:
        biases = bias_ptr + expert * 2 * num_columns + row
        gate_sum += tl.load(biases).to(tl.float32)
        up_sum += tl.load(biases + num_columns).to(tl.float32)
    hidden = gate_tile(gate_sum, up_sum, alpha, limit, KIND, hidden_ptr.dtype.element_ty)
    target = hidden_ptr + pair.to(tl.int64) * num_columns + row
    tl.store(target, hidden.to(hidden_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _pair_down_kernel(
    hidden_ptr,  # [P, K]
    weight_ptr,  # [E, N, K]
    bias_ptr,  # [E, N] or None
    weights_ptr,  # [P] float32
    experts_ptr,  # [P]
    out_ptr,  # [T, N]
    num_rows,  # N
    size,  # K
    TOP_K: tl.constexpr,
    CHUNKS: tl.constexpr,  # K / BLOCK_K, rounded up
    EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,  # inputs of each row
    PIECES: tl.constexpr,  # of a row that is prefetched, so that all threads take part
    PARTIAL: tl.constexpr,  # many choices may be of experts that are elsewhere
    PDL: tl.constexpr,
):
    tile, token = tl.program_id(0), tl.program_id(1)
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    exists = row < num_rows
    row = tl.where(exists, row, 0)
    first = token * TOP_K
    if PDL:
        gdc_launch_dependents()
        if PREFETCHED:
            for choice in tl.static_range(TOP_K):
                expert = tl.load(experts_ptr + first + choice).to(tl.int64)
                matrix = weight_ptr + tl.maximum(expert, 0) * num_rows * size
                if not PARTIAL:  # noqa: SIM114 - which of these branches there are is known when it is compiled
                    prefetch_rows(matrix, row, size, 0, PREFETCHED, PIECES)
                elif expert >= 0:
                    prefetch_rows(matrix, row, size, 0, PREFETCHED, PIECES)
        gdc_wait()
    acc = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for step in tl.range(0, TOP_K * CHUNKS, num_stages=STAGES):
        pair, k = first + step // CHUNKS, step % CHUNKS * BLOCK_K
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair)
        inside = (column + k < size) & (expert >= 0)
        if EVEN_K:
            inside = tl.full((BLOCK_K,), 1, tl.int1) & (expert >= 0)
        h = tl.load(hidden_ptr + pair.to(tl.int64) * size + k + column, mask=inside, other=0.0)
        rows = weight_ptr + (tl.maximum(expert, 0) * num_rows + row)[:, None] * size
        w = tl.load(rows + (k + column)[None, :], mask=inside[None, :], other=0.0)
        acc += w.to(tl.float32) * (h.to(tl.float32) * weight)[None, :]
    total = tl.sum(acc, axis=1)
    if bias_ptr is not None:
        for choice in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + first + choice).to(tl.int64)
            bias = tl.load(bias_ptr + tl.maximum(expert, 0) * num_rows + row).to(tl.float32)
            total += tl.where(expert < 0, 0.0, bias * tl.load(weights_ptr + first + choice))
    target = out_ptr + token.to(tl.int64) * num_rows + row
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=exists)


def pair_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    gate_up: PairConfig,
    down: PairConfig,
) -> torch.Tensor:
    """`moe_experts` of a few tokens."""
    (num_tokens, size), (_, num_rows, width) = x.shape, layer.down.shape
    top_k, num_pairs = experts.shape[1], experts.numel()
    assert x.stride(1) == 1
    for each in (weights, experts, layer.gate_up, layer.down):
        assert each.is_contiguous()
    partial = layer.among > len(layer.down)
    hidden = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    _pair_gate_up_kernel[(-(-width // gate_up.rows), num_pairs)](
        x, layer.gate_up, layer.gate_up_bias, experts, hidden, x.stride(0), width, size, layer.gate.alpha,
        layer.gate.limit,
        KIND=str(layer.gate.kind), TOP_K=top_k, EVEN_K=size % gate_up.depth == 0, ROWS=gate_up.rows,
        BLOCK_K=gate_up.depth, STAGES=gate_up.stages, num_warps=gate_up.warps, **pdl(x.device),
    )  # fmt: skip
    _pair_down_kernel[(-(-num_rows // down.rows), num_tokens)](
        hidden, layer.down, layer.down_bias, weights, experts, out, num_rows, width,
        TOP_K=top_k, CHUNKS=-(-width // down.depth), EVEN_K=width % down.depth == 0, ROWS=down.rows,
        BLOCK_K=down.depth, STAGES=down.stages, PREFETCHED=width if down.prefetch else 0,
        PIECES=down.pieces(width), PARTIAL=partial, num_warps=down.warps, **pdl(x.device),
    )  # fmt: skip
    return out
