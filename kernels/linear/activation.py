"""Gated product of a fused gate_up projection, and of one to which adapters add."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagebus.kernels.coded.rounding import LARGEST, LEAST, RoundedTokens, round_rows, round_tokens, rounded_like
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import constant, next_power_of_2, tl, triton
from pagebus.kernels.lora.pages import PLACE_FIELDS, RANKS, PagedTable, elements
from pagebus.kernels.lora.plan import DECODE_TOKENS, AdapterPlan

GATES = {"silu": 1, "gelu_tanh": 2}
"""Activations of gates, by the numbers that kernels know them by; 0 is no gate."""


MOST_OF_A_PROGRAM = 32768
"""Numbers of a token that one program rounds."""
BLOCK_N = 128
NONE = constant(1 << 30)
"""Behind all places of adapters."""


def activation_mul_reference(x: torch.Tensor, act: str = "silu") -> torch.Tensor:
    """act(x[:, :I]) * x[:, I:], ``act`` one of `GATES`. x [T, 2I] (gate | up) -> [T, I]; the activation is rounded to
    x's dtype first."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if GATES[act] == 1 else F.gelu(gate, approximate="tanh")) * up


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """`activation_mul_reference` of SiLU."""
    return activation_mul_reference(x)


@triton.jit
def activate(x, GATED: tl.constexpr):
    """The activation of float32 x: SiLU, or GELU by its tanh approximation, which is x times a sigmoid too."""
    power = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GATED == 2 else x
    return x / (1.0 + tl.exp(-power))


@triton.jit(do_not_specialize=["num_tokens"])
def _activation_mul_kernel(
    x_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    stride_x,
    num_tokens,
    SIZE: tl.constexpr,  # I
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,  # one of GATES
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + columns, mask=mask, other=0.0)
    activated = activate(gate, GATED).to(up.dtype).to(tl.float32)
    product = activated * up.to(tl.float32)
    tl.store(out_ptr + token * SIZE + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """`activation_mul` of SiLU."""
    return activation_mul(x)


def activation_mul(x: torch.Tensor, act: str = "silu") -> torch.Tensor:
    """act(x[:, :I]) * x[:, I:], ``act`` one of `GATES`. x [T, 2I] (gate | up), contiguous rows -> [T, I]."""
    assert x.dim() == 2
    assert x.shape[1] % 2 == 0
    assert x.stride(1) == 1
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = min(1024, next_power_of_2(size))
    grid = (num_tokens, -(-size // block))
    _activation_mul_kernel[grid](
        x, out, x.stride(0), num_tokens, SIZE=size, BLOCK=block, GATED=GATES[act], num_warps=4, **pdl(x.device)
    )  # fmt: skip
    return out


@triton.jit
def _rounded_activation_kernel(
    x_ptr,  # [T, 2I]
    out_ptr,  # [T, I] of 8 bits
    scale_ptr,  # [T]
    stride_x,
    SIZE: tl.constexpr,  # I
    BLOCK: tl.constexpr,  # I rounded up
    GATED: tl.constexpr,  # one of GATES
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    WHOLE: tl.constexpr,  # to whole numbers
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x_ptr + token * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + columns, mask=mask, other=0.0)
    activated = activate(gate, GATED).to(up.dtype).to(tl.float32)
    product = (activated * up.to(tl.float32)).to(up.dtype).to(tl.float32)
    scaled, scale = round_rows(product.reshape(1, BLOCK), LARGEST, LEAST, WHOLE)
    tl.store(out_ptr + token * SIZE + columns, scaled.reshape(BLOCK).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + token + tl.arange(0, 1), scale)


def rounded_activation_mul(x: torch.Tensor, act: str, dtype: torch.dtype) -> RoundedTokens:
    """`activation_mul` of x [T, 2I], rounded to ``dtype`` of 8 bits, in one kernel."""
    size = x.shape[1] // 2
    block = max(16, next_power_of_2(size))
    if block > MOST_OF_A_PROGRAM:
        product = activation_mul(x, act)
        return RoundedTokens(*round_tokens(product, dtype), x.dtype)
    assert x.stride(1) == 1
    out = rounded_like(x[:, :size], dtype)
    if len(x):
        _rounded_activation_kernel[(len(x),)](
            x, out.values, out.scale, x.stride(0), SIZE=size, BLOCK=block, GATED=GATES[act], LARGEST=LARGEST[dtype],
            LEAST=LEAST, WHOLE=dtype == torch.int8, num_warps=min(16, max(4, block // 512)), **pdl(x.device),
        )  # fmt: skip
    return out


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
    gate, up = gate.to(y_ptr.dtype.element_ty).to(tl.float32), up.to(y_ptr.dtype.element_ty).to(tl.float32)
    result = activate(gate, GATED).to(y_ptr.dtype.element_ty).to(tl.float32) * up
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
