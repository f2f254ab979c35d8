"""The first half of what adapters add: s = scale (x A^T), as sums over parts of K, which the second half adds up.

A program multiplies the tokens of a segment with one module's A over a part of K. Programs never wait for each other,
and parts are of the same size and in the same order for any number of tokens. So a token's bits depend on the token and
its adapter alone. Ranks may differ from segment to segment: a program takes 16 rows of A at a time.
"""

from __future__ import annotations

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import next_power_of_2, tl, triton
from pagebus.kernels.lora.pages import COLUMNS, PLACE_FIELDS, PagedTable, elements
from pagebus.kernels.lora.plan import PROMPT_TOKENS, AdapterPlan

PART, PART_OF_FLOATS, WARPS = 1024, 256, 4
"""Inputs that a program multiplies, in 16 bits and in float32; each of its warps takes its share of them."""
PROGRAMS = 8
"""For each multiprocessor, about this many programs take segments until there are no more."""


def num_parts(num_inputs: int, dtype: torch.dtype, tokens: int) -> int:
    """Parts of K whose sums `shrink` leaves, by the ``tokens`` of a plan's segments."""
    return 1 if tokens == PROMPT_TOKENS else -(-num_inputs // block_of(dtype))


def block_of(dtype: torch.dtype) -> int:
    """The inputs that a program multiplies at a time."""
    return PART if dtype.itemsize == 2 else PART_OF_FLOATS


@triton.jit
def rows_of_a(
    pages_ptr, adapter, a, first_row, rows, rank, row, inputs, size, COLUMN: tl.constexpr, PAGES: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Where 16 rows of A begin [.., 16] at the ``inputs`` [.., 1], multiples of COLUMN, and which of them exist."""
    exists = (row < rank) & (inputs < size)
    offset = a + (inputs // COLUMNS * rows + first_row + row) * COLUMNS + inputs % COLUMNS
    place = elements(pages_ptr, adapter, offset, exists, PAGES, PAGE)
    return tl.multiple_of(tl.where(exists, place, 0), [COLUMN, COLUMN]), exists


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x_ptr,  # [T, K]
    s_ptr,  # [PARTS, T, MODULES * LARGEST] float32
    memory_ptr,
    pages_ptr,  # [L, PAGES]
    places_ptr,  # [L, FIELDS]
    scales_ptr,  # [L, MODULES]
    first_ptr,
    count_ptr,
    adapter_ptr,
    number_ptr,
    stride_x,
    num_tokens,  # T
    size,  # K
    MODULES: tl.constexpr,
    LARGEST: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    CONSTANTS: tl.constexpr,  # some adapter may have a constant rank
    TOKENS: tl.constexpr,  # of a segment, at most
    SHARES: tl.constexpr,  # of the inputs of a part: one for each warp
    SHARE: tl.constexpr,  # inputs of it, COLUMNS or fewer
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    module, part = tl.program_id(1), tl.program_id(2)
    row, token = tl.arange(0, 16), tl.arange(0, TOKENS)
    inputs = (part * SHARES + tl.arange(0, SHARES)) * SHARE
    column = tl.arange(0, SHARE)
    number = tl.load(number_ptr)
    if PDL:
        gdc_launch_dependents()
        first_segment = tl.program_id(0)
        adapter = tl.load(adapter_ptr + first_segment, mask=first_segment < number, other=0)
        rank = tl.load(places_ptr + adapter * FIELDS, mask=first_segment < number, other=0)
        rows = tl.load(places_ptr + adapter * FIELDS + 1)
        first_row = tl.load(places_ptr + adapter * FIELDS + 2) * module
        a = tl.load(places_ptr + adapter * FIELDS + 3)
        for begin in range(0, rank, 16):
            place, exists = rows_of_a(
                pages_ptr, adapter, a, first_row, rows, rank, begin + row[None, :], inputs[:, None], size, SHARE, PAGES,
                PAGE,
            )  # fmt: skip
            prefetch(memory_ptr + place, SHARE)
        gdc_wait()
    for segment in range(tl.program_id(0), number, tl.num_programs(0)):
        adapter = tl.load(adapter_ptr + segment)
        first, count = tl.load(first_ptr + segment).to(tl.int64), tl.load(count_ptr + segment)
        rank = tl.load(places_ptr + adapter * FIELDS)
        rows = tl.load(places_ptr + adapter * FIELDS + 1)
        first_row = tl.load(places_ptr + adapter * FIELDS + 2) * module
        a = tl.load(places_ptr + adapter * FIELDS + 3)
        scale = tl.load(scales_ptr + adapter * MODULES + module)
        present = (token < count)[None, :, None] & (inputs[:, None] + column[None, :] < size)[:, None, :]
        values = x_ptr + (first + token)[None, :, None] * stride_x + inputs[:, None, None] + column[None, None, :]
        x = tl.load(values, mask=present & (rank > 0), other=0.0)
        sums = s_ptr + (part * num_tokens.to(tl.int64) + first + token)[:, None] * (MODULES * LARGEST)
        for begin in tl.range(0, rank, 16, num_stages=1):  # A comes to registers, x stays there
            place, exists = rows_of_a(
                pages_ptr, adapter, a, first_row, rows, rank, begin + row[None, :], inputs[:, None], size, SHARE, PAGES,
                PAGE,
            )  # fmt: skip
            places = memory_ptr + place[:, :, None] + column[None, None, :]
            weights = tl.load(places, mask=exists[:, :, None], other=0.0)
            products = tl.dot(x, tl.permute(weights, (0, 2, 1)), input_precision=PRECISION)
            s = tl.sum(products, axis=0) * scale
            if CONSTANTS:
                constant = tl.load(places_ptr + adapter * FIELDS + 5) - 1
                s = tl.where((begin + row == constant)[None, :], tl.where(part == 0, 1.0, 0.0), s)
            mask = (token < count)[:, None] & (begin + row < rank)[None, :]
            tl.store(sums + module * LARGEST + begin + row[None, :], s, mask=mask)


@triton.jit
def prefetch(pointers, NUMBERS: tl.constexpr):
    """Prefetch so many numbers behind each pointer into the L2 cache."""
    num_bytes = tl.full(pointers.shape, NUMBERS * pointers.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [pointers, num_bytes], tl.int32, False, 1
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_prompts_kernel(
    x_ptr,  # [T, K]
    s_ptr,  # [T, MODULES * LARGEST] float32
    memory_ptr,
    pages_ptr,
    places_ptr,
    scales_ptr,
    first_ptr,
    count_ptr,
    adapter_ptr,
    number_ptr,
    stride_x,
    num_tokens,
    size,
    MODULES: tl.constexpr,
    LARGEST: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,  # of A at a time
    BLOCK_K: tl.constexpr,  # COLUMNS or fewer
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    module = tl.program_id(1)
    row, token, column = tl.arange(0, ROWS), tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for segment in range(tl.program_id(0), tl.load(number_ptr), tl.num_programs(0)):
        adapter = tl.load(adapter_ptr + segment)
        first, count = tl.load(first_ptr + segment).to(tl.int64), tl.load(count_ptr + segment)
        rank = tl.load(places_ptr + adapter * FIELDS)
        rows = tl.load(places_ptr + adapter * FIELDS + 1)
        first_row = tl.load(places_ptr + adapter * FIELDS + 2) * module
        a = tl.load(places_ptr + adapter * FIELDS + 3)
        scale = tl.load(scales_ptr + adapter * MODULES + module)
        present = (token < count)[:, None]
        values = x_ptr + (first + token)[:, None] * stride_x + column[None, :]
        sums = s_ptr + (first + token)[:, None] * (MODULES * LARGEST) + module * LARGEST
        for begin in range(0, rank, ROWS):
            acc = tl.zeros((TOKENS, ROWS), tl.float32)
            for k in tl.range(0, size, BLOCK_K, num_stages=STAGES):
                place, exists = rows_of_a(
                    pages_ptr, adapter, a, first_row, rows, rank, begin + row[:, None], tl.full((1, 1), k, tl.int32),
                    size, BLOCK_K, PAGES, PAGE,
                )  # fmt: skip
                x = tl.load(values + k, mask=present & (column + k < size)[None, :], other=0.0)
                weights = tl.load(memory_ptr + place + column[None, :], mask=exists, other=0.0)
                acc = tl.dot(x, tl.trans(weights), acc, input_precision=PRECISION)
            s = acc * scale
            if CONSTANTS:
                constant = tl.load(places_ptr + adapter * FIELDS + 5) - 1
                s = tl.where((begin + row == constant)[None, :], 1.0, s)
            tl.store(sums + begin + row[None, :], s, mask=present & (begin + row < rank)[None, :])


def shrink(x: torch.Tensor, table: PagedTable, plan: AdapterPlan) -> torch.Tensor:
    """x [T, K] -> s [parts, T, J * R] float32, whose sum over parts is x A^T times the scale of each module. It is
    undefined for tokens without an adapter, and behind an adapter's rank."""
    (num_tokens, size), modules, device = x.shape, len(table.widths), x.device
    assert x.stride(1) == 1
    assert len(plan.of_token) == num_tokens
    assert x.dtype == table.memory.dtype
    parts = num_parts(size, x.dtype, plan.tokens)
    s = torch.empty((parts, num_tokens, modules * table.largest), dtype=torch.float32, device=device)
    if num_tokens == 0:
        return s
    segments, target = plan.segments, target_of(device)
    most = max(1, PROGRAMS * (target.num_multiprocessors if target else 1) // (modules * parts))
    arguments = (
        x, s, table.memory, table.pages, table.places, table.scales, segments.first_token, segments.count,
        segments.adapter, segments.number, x.stride(0), num_tokens, size,
    )  # fmt: skip
    constants = {
        "MODULES": modules, "LARGEST": table.largest, "PAGES": table.pages.shape[1], "PAGE": table.kernel_page,
        "FIELDS": PLACE_FIELDS, "CONSTANTS": table.constants, "TOKENS": plan.tokens, "PRECISION": "ieee",
    }  # fmt: skip
    grid = (min(len(segments.adapter), most), modules, parts)
    if plan.tokens == PROMPT_TOKENS:
        wide = x.itemsize > 2
        _shrink_prompts_kernel[grid](
            *arguments, **constants, ROWS=16 if wide else min(64, max(16, next_power_of_2(table.largest))),
            BLOCK_K=32 if wide else 128, STAGES=2 if wide else 3, num_warps=4, **pdl(device),
        )  # fmt: skip
    else:
        _shrink_kernel[grid](
            *arguments, **constants, SHARES=WARPS, SHARE=block_of(x.dtype) // WARPS, num_warps=WARPS, **pdl(device)
        )  # fmt: skip
    return s
