"""The second half of what adapters add: y += s B^T, behind a product or within it.

Products of few tokens call :func:`expanded` on their tiles, so that what follows the product (a bias, an activation, a
residual) follows the sum; those of the fewest have :mod:`pagebus.kernels.lora.within`. Behind a product of the library,
:func:`expand` adds to the result in place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import constant, next_power_of_2, tl, triton
from pagebus.kernels.lora.pages import PLACE_FIELDS, RANKS, PagedTable, elements
from pagebus.kernels.lora.plan import DECODE_TOKENS, AdapterPlan

PROGRAMS = 8
"""For each multiprocessor, about this many programs take segments until there are no more."""

LARGE_TILE = constant(2048)
"""Of larger tiles only half of 8 ranks are loaded at a time: registers hold no more."""


class Expansion(NamedTuple):
    """What a product adds to its tiles: ``s`` [parts, T, J * R] as `pagebus.kernels.lora.shrink.shrink` leaves it,
    times the B of each token's adapter. With an ``x`` [T, K], the product itself makes s of that, and counts its
    programs in the place ``turn`` of the plan's arrivals."""

    s: torch.Tensor
    table: PagedTable
    plan: AdapterPlan
    x: torch.Tensor | None = None
    turn: int = 0


def expansion_arguments(expansion: Expansion | None) -> dict[str, Any]:
    """Arguments of kernels that call :func:`expanded`; ``s_ptr`` is None where there are no adapters."""
    if expansion is None:
        return dict.fromkeys(("s_ptr", "of_token_ptr", "memory_ptr", "pages_ptr", "places_ptr"), None) | dict.fromkeys(
            ("second_row", "third_row", "S_PARTS", "SUMS", "LARGEST", "MODULES", "PAGES", "PAGE", "FIELDS"), 0
        )
    s, table, plan = expansion[:3]
    assert expansion.x is None
    return {
        "s_ptr": s, "of_token_ptr": plan.of_token, "memory_ptr": table.memory, "pages_ptr": table.pages,
        "places_ptr": table.places, "second_row": table.bounds[0], "third_row": table.bounds[1], "S_PARTS": len(s),
        "SUMS": next_power_of_2(len(s)), "LARGEST": table.largest, "MODULES": len(table.widths),
        "PAGES": table.pages.shape[1], "PAGE": table.kernel_page, "FIELDS": PLACE_FIELDS,
    }  # fmt: skip


@triton.jit
def module_of(row, second_row, third_row):
    """The module that output ``row`` belongs to."""
    return (row >= second_row).to(tl.int32) + (row >= third_row).to(tl.int32)


@triton.jit
def expanded(
    row, token, num_tokens, s_ptr, of_token_ptr, memory_ptr, pages_ptr, places_ptr, second_row, third_row, first_module,
    last_module, S_PARTS: tl.constexpr, SUMS: tl.constexpr, LARGEST: tl.constexpr, MODULES: tl.constexpr,
    PAGES: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """What adapters add to a tile: float32 [rows, tokens], of outputs ``row`` [rows], all of the modules from
    ``first_module`` to ``last_module``, and of any ``token`` [tokens]. Each token's sums are its own, rank by rank."""
    adapter = tl.load(of_token_ptr + token, mask=token < num_tokens, other=-1)
    adapted = adapter >= 0
    adapter = tl.where(adapted, adapter, 0)
    rank = tl.load(places_ptr + adapter * FIELDS, mask=adapted, other=0)
    b = tl.load(places_ptr + adapter * FIELDS + 4, mask=adapted, other=0)
    most = tl.max(rank, axis=0)
    STEP: tl.constexpr = RANKS if row.shape[0] * token.shape[0] <= LARGE_TILE else RANKS // 2
    number = tl.arange(0, STEP)
    total = tl.zeros((row.shape[0], token.shape[0]), tl.float32)
    part = tl.arange(0, SUMS)
    sums = s_ptr + (part.to(tl.int64)[:, None, None] * num_tokens + token[None, :, None]) * (MODULES * LARGEST)
    sums += number[None, None, :]
    for module in range(first_module, last_module + 1):
        mine = module_of(row, second_row, third_row) == module
        for begin in range(0, most, STEP):
            inside = begin < rank
            held = (part < S_PARTS)[:, None, None] & inside[None, :, None]
            s = tl.sum(tl.load(sums + module * LARGEST + begin, mask=held, other=0.0), axis=0)
            mask = mine[:, None] & inside[None, :]
            offset = b[None, :] + row[:, None] * rank[None, :] + begin
            place = elements(pages_ptr, adapter[None, :], offset, mask, PAGES, PAGE)
            place = tl.multiple_of(tl.where(mask, place, 0), [STEP, STEP])
            weights = tl.load(memory_ptr + place[:, :, None] + number[None, None, :], mask=mask[:, :, None], other=0.0)
            total += tl.sum(weights.to(tl.float32) * s[None, :, :], axis=2)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    s_ptr,  # [S_PARTS, T, MODULES * LARGEST] float32
    y_ptr,  # [T, N]
    memory_ptr,
    pages_ptr,
    places_ptr,
    first_ptr,
    count_ptr,
    adapter_ptr,
    number_ptr,
    rows_ptr,  # [T], or None
    stride_y,
    num_tokens,  # T
    num_rows,  # N
    second_row,  # the second module's first output, N if there is none
    third_row,
    S_PARTS: tl.constexpr,
    LARGEST: tl.constexpr,
    MODULES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    TOKENS: tl.constexpr,  # of a segment, at most
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    # Tiles never cross from a module to the next.
    tile = tl.program_id(0)
    tiles, more = tl.cdiv(second_row, BLOCK_N), tl.cdiv(third_row - second_row, BLOCK_N)
    module = (tile >= tiles).to(tl.int32) + (tile >= tiles + more).to(tl.int32)
    begin_row = tl.where(module == 0, 0, tl.where(module == 1, second_row, third_row))
    end_row = tl.where(module == 0, second_row, tl.where(module == 1, third_row, num_rows))
    tile -= tl.where(module == 0, 0, tl.where(module == 1, tiles, tiles + more))
    row = begin_row + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = row < end_row
    token, panel, number = tl.arange(0, TOKENS), tl.arange(0, 2), tl.arange(0, RANKS)
    distance = num_tokens.to(tl.int64) * (MODULES * LARGEST)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for segment in range(tl.program_id(1), tl.load(number_ptr), tl.num_programs(1)):
        adapter = tl.load(adapter_ptr + segment)
        first, count = tl.load(first_ptr + segment).to(tl.int64), tl.load(count_ptr + segment)
        rank = tl.load(places_ptr + adapter * FIELDS)
        b = tl.load(places_ptr + adapter * FIELDS + 4)
        present = token < count
        target = first + token
        if rows_ptr is not None:
            target = tl.load(rows_ptr + target, mask=present, other=0).to(tl.int64)
        targets = y_ptr + target[:, None] * stride_y + row[None, :]
        mask = present[:, None] & exists[None, :] & (rank > 0)
        y = tl.load(targets, mask=mask, other=0.0).to(tl.float32)
        sums = s_ptr + (first + token)[:, None] * (MODULES * LARGEST) + module * LARGEST
        # Of few tokens B comes to registers, 16 bytes at a time: on a way through shared memory it is scattered there.
        for begin in tl.range(0, rank, 16, num_stages=STAGES):
            column = begin + tl.arange(0, 16)
            inside = present[:, None] & (column < rank)[None, :]
            s = tl.load(sums + column[None, :], mask=inside, other=0.0)
            for part in tl.static_range(1, S_PARTS):
                s += tl.load(sums + part * distance + column[None, :], mask=inside, other=0.0)
            eights = begin + panel * RANKS
            held = exists[:, None] & (eights < rank)[None, :]
            offset = b + row[:, None] * rank + eights[None, :]
            place = elements(pages_ptr, adapter, offset, held, PAGES, PAGE)
            place = tl.multiple_of(tl.where(held, place, 0), [8, 8])
            weights = tl.load(memory_ptr + place[:, :, None] + number[None, None, :], mask=held[:, :, None], other=0.0)
            weights = weights.reshape(BLOCK_N, 2 * RANKS)
            y = tl.dot(s.to(weights.dtype), tl.trans(weights), y, input_precision=PRECISION)
        tl.store(targets, y.to(y_ptr.dtype.element_ty), mask=mask)


def expand(
    s: torch.Tensor, table: PagedTable, plan: AdapterPlan, y: torch.Tensor, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Add s B^T to y [T, N], in place, and return it; s [parts, T, J * R] is what `shrink` gave. ``rows`` [T] int32:
    which row of y each of them adds to; None: its own."""
    num_tokens, num_rows = y.shape
    assert y.stride(1) == 1
    assert num_rows == sum(table.widths)
    if num_tokens == 0:
        return y
    segments, target, (second_row, third_row) = plan.segments, target_of(y.device), table.bounds
    block = min(128, max(16, next_power_of_2(min(table.widths))))
    tiles = sum(-(-width // block) for width in table.widths)
    most = max(1, PROGRAMS * (target.num_multiprocessors if target else 1) // tiles)
    _expand_kernel[(tiles, min(len(segments.adapter), most))](
        s, y, table.memory, table.pages, table.places, segments.first_token, segments.count, segments.adapter,
        segments.number, rows, y.stride(0), num_tokens, num_rows, second_row, third_row,
        S_PARTS=len(s), LARGEST=table.largest, MODULES=len(table.widths), PAGES=table.pages.shape[1],
        PAGE=table.kernel_page, FIELDS=PLACE_FIELDS, TOKENS=plan.tokens, BLOCK_N=block,
        STAGES=1 if plan.tokens == DECODE_TOKENS else 3, PRECISION="ieee", num_warps=4, **pdl(y.device),
    )  # fmt: skip
    return y
