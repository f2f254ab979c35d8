"""What adapters add to a product of gate and up, added where that is read next: by the activation of gates."""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import constant, tl, triton
from pagebus.kernels.linear.activation import GATES
from pagebus.kernels.linear.epilogue import gated_tile
from pagebus.kernels.lora.pages import PLACE_FIELDS, RANKS, PagedTable, elements
from pagebus.kernels.lora.plan import DECODE_TOKENS, AdapterPlan

BLOCK_N = 128
NONE = constant(1 << 30)
"""Behind all places of adapters."""


@triton.jit
def _rows_of_b(
    memory_ptr, pages_ptr, adapter, b, row, exists, rank, begin, PAGES: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """16 ranks from ``begin`` on of the outputs ``row``: [BLOCK_N, 16]."""
    eights = begin + tl.arange(0, 2) * RANKS
    held = exists[:, None] & (eights < rank)[None, :]
    place = elements(pages_ptr, adapter, b + row[:, None] * rank + eights[None, :], held, PAGES, PAGE)
    place = tl.multiple_of(tl.where(held, place, 0), [8, 8])
    eight = tl.arange(0, RANKS)
    weights = tl.load(memory_ptr + place[:, :, None] + eight[None, None, :], mask=held[:, :, None], other=0.0)
    return weights.reshape(BLOCK_N, 2 * RANKS)


@triton.jit
def _sums(sums, distance, held, S_PARTS: tl.constexpr):
    s = tl.load(sums, mask=held, other=0.0)
    for part in tl.static_range(1, S_PARTS):
        s += tl.load(sums + part * distance, mask=held, other=0.0)
    return s


@triton.jit(do_not_specialize=["num_tokens"])
def _adapted_activation_kernel(
    y_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    s_ptr,  # [PARTS, T, 2 * LARGEST] float32
    of_token_ptr,  # [T]
    memory_ptr,
    pages_ptr,
    places_ptr,
    stride_y,
    num_tokens,  # T
    width,  # I
    S_PARTS: tl.constexpr,
    LARGEST: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    GATED: tl.constexpr,  # one of GATES
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    row, token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists, present, column = row < width, token < num_tokens, tl.arange(0, 16)
    distance = num_tokens.to(tl.int64) * (2 * LARGEST)
    if PDL:
        gdc_launch_dependents()
    adapter = tl.load(of_token_ptr + token, mask=present, other=-1)  # plans are there before their passes begin
    left = tl.where(adapter >= 0, adapter, NONE)
    first = tl.min(left, axis=0)
    if PDL:
        gdc_wait()
    mask = present[:, None] & exists[None, :]
    gates = y_ptr + token.to(tl.int64)[:, None] * stride_y + row[None, :]
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=mask, other=0.0).to(tl.float32)
    sums = s_ptr + token.to(tl.int64)[:, None] * (2 * LARGEST) + column[None, :]
    while first < NONE:  # for each adapter of the tile
        member = left == first
        rank = tl.load(places_ptr + first * FIELDS)
        b = tl.load(places_ptr + first * FIELDS + 4)
        for begin in tl.range(0, rank, 16, num_stages=1):  # B comes to registers, 16 bytes at a time
            held = member[:, None] & (begin + column < rank)[None, :]
            weights = _rows_of_b(memory_ptr, pages_ptr, first, b, row, exists, rank, begin, PAGES, PAGE, BLOCK_N)
            s = _sums(sums + begin, distance, held, S_PARTS)
            gate = tl.dot(s.to(weights.dtype), tl.trans(weights), gate, input_precision=PRECISION)
            weights = _rows_of_b(
                memory_ptr, pages_ptr, first, b, width + row, exists, rank, begin, PAGES, PAGE, BLOCK_N
            )
            s = _sums(sums + LARGEST + begin, distance, held, S_PARTS)
            up = tl.dot(s.to(weights.dtype), tl.trans(weights), up, input_precision=PRECISION)
        left = tl.where(member, NONE, left)
        first = tl.min(left, axis=0)
    result = gated_tile(gate, up, out_ptr.dtype.element_ty, GATED)
    out = out_ptr + token.to(tl.int64)[:, None] * width + row[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)


def adapted_activation_mul(
    s: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor, act: str = "silu"
) -> torch.Tensor:
    """act(gate) * up of y [T, 2I] (gate | up) plus s B^T -> [T, I]; s [parts, T, 2 R] is what `shrink` gave."""
    num_tokens, width = len(y), y.shape[1] // 2
    assert y.stride(1) == 1
    assert table.widths == (width, width)
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
    if num_tokens == 0:
        return out
    tokens = DECODE_TOKENS if plan.tokens == DECODE_TOKENS else 2 * DECODE_TOKENS
    _adapted_activation_kernel[(-(-width // BLOCK_N), -(-num_tokens // tokens))](
        y, out, s, plan.of_token, table.memory, table.pages, table.places, y.stride(0), num_tokens, width,
        S_PARTS=len(s), LARGEST=table.largest, PAGES=table.pages.shape[1], PAGE=table.kernel_page, FIELDS=PLACE_FIELDS,
        GATED=GATES[act], TOKENS=tokens, BLOCK_N=BLOCK_N, PRECISION="ieee", num_warps=4, **pdl(y.device),
    )  # fmt: skip
    return out
