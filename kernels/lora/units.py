"""The first half of what adapters add, by units: one module of a segment, over a part of K, block by block.

A program that takes units reads its first A before it waits for the tokens. It has each next block of A on its way
while it multiplies, also that of the next unit.
"""

from __future__ import annotations

from pagebus.kernels.common.pdl import gdc_wait
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.lora.pages import COLUMNS, elements


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


@triton.jit
def _unit(unit, there, places_ptr, adapter_ptr, S_PARTS: tl.constexpr, MODULES: tl.constexpr, FIELDS: tl.constexpr):
    """The adapter of a unit, its rank, and where A begins: rows, the module's first, and the element. Of one that is
    not ``there`` the rank is 0."""
    adapter = tl.load(adapter_ptr + unit // (MODULES * S_PARTS), mask=there, other=0)
    rank = tl.load(places_ptr + adapter * FIELDS, mask=there, other=0)
    rows = tl.load(places_ptr + adapter * FIELDS + 1)
    first_row = tl.load(places_ptr + adapter * FIELDS + 2) * (unit // S_PARTS % MODULES)
    return adapter, rank, rows, first_row, tl.load(places_ptr + adapter * FIELDS + 3)


@triton.jit
def _either(condition, left, right):
    return (
        tl.where(condition, left[0], right[0]), tl.where(condition, left[1], right[1]),
        tl.where(condition, left[2], right[2]), tl.where(condition, left[3], right[3]),
        tl.where(condition, left[4], right[4]),
    )  # fmt: skip


@triton.jit
def _block_of_a(
    unit, begin, block, size, memory_ptr, pages_ptr, PAGES: tl.constexpr, PAGE: tl.constexpr, SHARES: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """16 rows from ``begin`` on of A at a block's inputs: [SHARES, 16, SHARE]."""
    adapter, rank, rows, first_row, a = unit
    inputs = (block * SHARES + tl.arange(0, SHARES)) * SHARE
    place, exists = rows_of_a(
        pages_ptr, adapter, a, first_row, rows, rank, begin + tl.arange(0, 16)[None, :], inputs[:, None], size, SHARE,
        PAGES, PAGE,
    )  # fmt: skip
    places = memory_ptr + place[:, :, None] + tl.arange(0, SHARE)[None, None, :]
    return tl.load(places, mask=exists[:, :, None], other=0.0)


@triton.jit
def shrink_units(
    index, programs, x_ptr, s_ptr, memory_ptr, pages_ptr, places_ptr, scales_ptr, first_ptr, count_ptr, adapter_ptr,
    units, stride_x, num_tokens, size, S_PARTS: tl.constexpr, LARGEST: tl.constexpr, MODULES: tl.constexpr,
    PAGES: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr, CONSTANTS: tl.constexpr, TOKENS: tl.constexpr,
    SHARES: tl.constexpr, SHARE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What program ``index`` of ``programs`` does of so many ``units``."""
    row, token, column, share = tl.arange(0, 16), tl.arange(0, TOKENS), tl.arange(0, SHARE), tl.arange(0, SHARES)
    blocks = tl.cdiv(size, SHARES * SHARE)
    unit = _unit(index, index < units, places_ptr, adapter_ptr, S_PARTS, MODULES, FIELDS)
    weights = _block_of_a(unit, 0, index % S_PARTS, size, memory_ptr, pages_ptr, PAGES, PAGE, SHARES, SHARE)
    if PDL:
        gdc_wait()
    for number in range(index, units, programs):
        segment, module, part = number // (MODULES * S_PARTS), number // S_PARTS % MODULES, number % S_PARTS
        adapter, rank, _, _, _ = unit
        first, count = tl.load(first_ptr + segment).to(tl.int64), tl.load(count_ptr + segment)
        scale = tl.load(scales_ptr + adapter * MODULES + module)
        following = number + programs
        later = _unit(following, following < units, places_ptr, adapter_ptr, S_PARTS, MODULES, FIELDS)
        values = x_ptr + (first + token)[None, :, None] * stride_x + column[None, None, :]
        sums = s_ptr + (part * num_tokens.to(tl.int64) + first + token)[:, None] * (MODULES * LARGEST)
        for begin in range(0, rank, 16):
            acc = tl.zeros((SHARES, TOKENS, 16), tl.float32)
            for block in tl.range(part, blocks, S_PARTS, num_stages=1):
                inputs = (block * SHARES + share) * SHARE
                present = (token < count)[None, :, None] & (inputs[:, None] + column[None, :] < size)[:, None, :]
                mine = weights
                # The next block: of these rows, of the next ones, or of the next unit.
                more, goes_on = block + S_PARTS < blocks, begin + 16 < rank
                weights = _block_of_a(
                    _either(more | goes_on, unit, later), tl.where(more, begin, tl.where(goes_on, begin + 16, 0)),
                    tl.where(more, block + S_PARTS, tl.where(goes_on, part, following % S_PARTS)), size, memory_ptr,
                    pages_ptr, PAGES, PAGE, SHARES, SHARE,
                )  # fmt: skip
                x = tl.load(values + inputs[:, None, None], mask=present, other=0.0)
                acc = tl.dot(x, tl.permute(mine, (0, 2, 1)), acc, input_precision=PRECISION)
            s = tl.sum(acc, axis=0) * scale
            if CONSTANTS:
                constant = tl.load(places_ptr + adapter * FIELDS + 5) - 1
                s = tl.where((begin + row == constant)[None, :], tl.where(part == 0, 1.0, 0.0), s)
            mask = (token < count)[:, None] & (begin + row < rank)[None, :]
            tl.store(sums + module * LARGEST + begin + row[None, :], s, mask=mask)
        if rank == 0:
            weights = _block_of_a(
                later, 0, following % S_PARTS, size, memory_ptr, pages_ptr, PAGES, PAGE, SHARES, SHARE
            )
        unit = later
