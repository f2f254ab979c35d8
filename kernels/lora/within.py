"""Both halves of what adapters add, within one product of tiles: programs of its own compute the first while others
multiply, and each tile adds the second to its sum.

The first programs of the grid multiply tokens with A, a part of K at a time, and count themselves in a place of the
plan that no other product has. GPUs start programs in their order, so those that wait for the count never keep the
counted ones from running. Tiles multiply some segments at a time with B: a token's columns are zero but for those of
its own segment, so it takes nothing from others.
"""

from __future__ import annotations

from typing import Any

import torch

from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import constant, next_power_of_2, tl, triton
from pagebus.kernels.lora.expand import Expansion, expanded, module_of, parts_of_sums
from pagebus.kernels.lora.pages import COLUMNS, PLACE_FIELDS, RANKS, PagedTable, elements
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.lora.shrink import block_of
from pagebus.kernels.lora.units import shrink_units

PARTS, MOST_PARTS = 4, 8
"""Parts of K that programs multiply apart: a block each, or two blocks each where there are more than the first; or, of
so many parts, more."""
MOST_TOGETHER, MOST_NUMBERS, LARGE_TILE = 8, 64, 32
"""Segments that a tile multiplies with B at a time, if a thread holds no more than so many numbers of B or of s; half
as many in tiles of more tokens than that."""
FEW_TURNS = 4
"""Where programs that find a free multiprocessor make the first half in so many turns, there are no others."""
FEW_TURNS_OF_B = constant(4)
"""Where tiles would take more turns than that to multiply all segments with B, each token is with its own."""
SHARED_BYTES, RESERVED = 228 << 10, 8 << 10
"""Of a multiprocessor, and what a program takes besides its tiles."""

POINTERS = (
    "s_ptr", "of_token_ptr", "adapted_ptr", "memory_ptr", "pages_ptr", "places_ptr", "scales_ptr", "first_ptr",
    "count_ptr", "adapter_ptr", "number_ptr", "arrived_ptr",
)  # fmt: skip
NUMBERS = (
    "stride_adapted", "second_row", "third_row", "shrinkers", "turn", "S_PARTS", "SUMS", "LARGEST", "MODULES", "PAGES",
    "PAGE", "FIELDS", "CONSTANTS", "TOGETHER", "TOKENS", "SHARE",
)  # fmt: skip


def within(x: torch.Tensor, table: PagedTable, plan: AdapterPlan) -> Expansion | None:
    """What a product of tiles adds to them, of x [T, K], both halves; None: as many products of the pass do so as
    can."""
    turn = None if plan.arrivals is None else plan.arrivals.take()
    if turn is None:
        return None
    assert x.stride(1) == 1
    assert x.dtype == table.memory.dtype
    blocks = -(-x.shape[1] // block_of(x.dtype))
    parts = blocks if blocks <= PARTS else min(MOST_PARTS, max(PARTS, -(-blocks // 2)))
    s = torch.empty((parts, len(x), len(table.widths) * table.largest), dtype=torch.float32, device=x.device)
    return Expansion(s, table, plan, x, turn)


def free_programs(programs: int, shared: int, device: torch.device) -> int:
    """How many more programs run beside the last wave of so many, each of so much shared memory."""
    target = target_of(device)
    if target is None:
        return 0
    return -programs % (target.num_multiprocessors * max(1, SHARED_BYTES // (shared + RESERVED)))


def within_arguments(expansion: Expansion | None, rows: int, tokens: int, warps: int, free: int) -> dict[str, Any]:
    """Arguments of a kernel about what adapters add to its tiles of ``rows`` and ``tokens``: all None and 0 without
    adapters. ``free``: programs that run beside all tiles of the last wave."""
    if expansion is None:
        return dict.fromkeys(POINTERS) | dict.fromkeys(NUMBERS, 0)
    s, table, plan, x, turn = expansion
    segments, modules, arrived, shrinkers = plan.segments, len(table.widths), None, 0
    if x is not None:
        assert plan.arrivals is not None
        arrived, units = plan.arrivals.counts, len(segments.adapter) * modules * len(s)
        target = target_of(x.device)
        shrinkers = min(units, free if units <= FEW_TURNS * free else target.num_multiprocessors if target else 2)
    together = 2 * MOST_NUMBERS * warps // max(rows, tokens) // (1 if tokens <= LARGE_TILE else 2)
    together = min(MOST_TOGETHER, next_power_of_2(len(segments.adapter)), together)
    return {
        "s_ptr": s, "of_token_ptr": plan.of_token, "adapted_ptr": x, "memory_ptr": table.memory,
        "pages_ptr": table.pages, "places_ptr": table.places, "scales_ptr": table.scales,
        "first_ptr": segments.first_token, "count_ptr": segments.count, "adapter_ptr": segments.adapter,
        "number_ptr": segments.number, "arrived_ptr": arrived, "stride_adapted": 0 if x is None else x.stride(0),
        "second_row": table.bounds[0], "third_row": table.bounds[1], "shrinkers": shrinkers, "turn": turn,
        "S_PARTS": len(s), "SUMS": next_power_of_2(len(s)), "LARGEST": table.largest, "MODULES": modules,
        "PAGES": table.pages.shape[1], "PAGE": table.kernel_page, "FIELDS": PLACE_FIELDS,
        "CONSTANTS": table.constants, "TOGETHER": together, "TOKENS": plan.tokens,
        "SHARE": min(int(COLUMNS), block_of(table.memory.dtype) // warps),
    }  # fmt: skip


@triton.jit
def shrink_within(
    index, shrinkers, x_ptr, s_ptr, memory_ptr, pages_ptr, places_ptr, scales_ptr, first_ptr, count_ptr, adapter_ptr,
    number_ptr, arrived_ptr, stride_x, num_tokens, size, S_PARTS: tl.constexpr, LARGEST: tl.constexpr,
    MODULES: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr, CONSTANTS: tl.constexpr,
    TOKENS: tl.constexpr, SHARES: tl.constexpr, SHARE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first half: what program ``index`` of ``shrinkers`` does, and that it has done so."""
    units = tl.load(number_ptr) * (MODULES * S_PARTS)
    if index < units:
        shrink_units(
            index, shrinkers, x_ptr, s_ptr, memory_ptr, pages_ptr, places_ptr, scales_ptr, first_ptr, count_ptr,
            adapter_ptr, units, stride_x, num_tokens, size, S_PARTS, LARGEST, MODULES, PAGES, PAGE, FIELDS, CONSTANTS,
            TOKENS, SHARES, SHARE, PRECISION, PDL,
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(arrived_ptr, 1, sem="release")


@triton.jit
def segments_of(begin, adapters, FIELDS: tl.constexpr, TOGETHER: tl.constexpr):
    """The segments from ``begin`` on: first tokens, ends and ranks [TOGETHER]; and adapters, ranks and where B begins
    [2 TOGETHER], of each twice."""
    _, _, _, _, places_ptr, first_ptr, count_ptr, adapter_ptr, number_ptr, _, _ = adapters
    number = tl.load(number_ptr)
    segment, half = begin + tl.arange(0, TOGETHER), begin + tl.arange(0, 2 * TOGETHER) // 2
    there, twice = segment < number, half < number
    first = tl.load(first_ptr + segment, mask=there, other=0)
    end = first + tl.load(count_ptr + segment, mask=there, other=0)
    each = tl.load(adapter_ptr + segment, mask=there, other=0)
    adapter = tl.load(adapter_ptr + half, mask=twice, other=0)
    ranks = tl.load(places_ptr + each * FIELDS, mask=there, other=0)
    rank = tl.load(places_ptr + adapter * FIELDS, mask=twice, other=0)
    b = tl.load(places_ptr + adapter * FIELDS + 4, mask=twice, other=0)
    return first, end, ranks, adapter, rank, b


@triton.jit
def prefetch_b(
    segments, adapters, tile, num_rows, PAGES: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch the B of the first segments for the rows of a tile into the L2 cache, in pieces for all threads."""
    _, _, memory_ptr, pages_ptr, _, _, _, _, _, _, _ = adapters
    _, _, _, adapter, rank, b = segments
    PIECES: tl.constexpr = min(THREADS // (2 * TOGETHER), BLOCK_N // 2)
    EACH: tl.constexpr = BLOCK_N // 2 // PIECES
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = BLOCK_N // HALVES
    half = tl.arange(0, 2 * TOGETHER) % 2
    place = (half[:, None] * PIECES + tl.arange(0, PIECES)[None, :]) * EACH
    row = tile * (ROWS // HALVES) + place % WIDTH
    rows = tl.minimum(tl.minimum(EACH, ROWS // HALVES - place % WIDTH), num_rows // HALVES - row)
    exists = (rows > 0) & (rank > 0)[:, None]
    offset = b[:, None] + (row + place // WIDTH * (num_rows // HALVES)) * rank[:, None]
    first = elements(pages_ptr, adapter[:, None], offset, exists, PAGES, PAGE)
    numbers = rows * rank[:, None]
    if PAGES > 1:
        numbers = tl.minimum(numbers, PAGE - offset % PAGE)
    num_bytes = tl.where(exists, numbers * (memory_ptr.dtype.element_ty.primitive_bitwidth // 8), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [memory_ptr + first, num_bytes], tl.int32, False, 1,
    )  # fmt: skip


@triton.jit
def rows_of_b(segments, adapters, row, begin, PAGES: tl.constexpr, PAGE: tl.constexpr, TOGETHER: tl.constexpr):
    """16 ranks from ``begin`` on of some segments' B at outputs ``row``, 16 bytes at a time to registers:
    [rows, 16 TOGETHER]."""
    _, _, memory_ptr, pages_ptr, _, _, _, _, _, _, _ = adapters
    _, _, _, adapter, rank, b = segments
    panel, eight = begin + tl.arange(0, 2 * TOGETHER) % 2 * RANKS, tl.arange(0, RANKS)
    exists = (row >= 0)[:, None] & (panel < rank)[None, :]
    offset = b[None, :] + row[:, None] * rank[None, :] + panel[None, :]
    place = elements(pages_ptr, adapter[None, :], offset, exists, PAGES, PAGE)
    place = tl.multiple_of(tl.where(exists, place, 0), [8, 8])
    weights = tl.load(memory_ptr + place[:, :, None] + eight[None, None, :], mask=exists[:, :, None], other=0.0)
    return weights.reshape(row.shape[0], 16 * TOGETHER)


@triton.jit
def _members(segments, token):
    """Which token is in which segment [tokens, TOGETHER]."""
    first, end, _, _, _, _ = segments
    return (token[:, None] >= first[None, :]) & (token[:, None] < end[None, :])


@triton.jit
def _spread(segments, parts, token, dtype: tl.constexpr, TOGETHER: tl.constexpr):
    """16 sums of each token, in the columns of its segment, the others 0: [tokens, 16 TOGETHER]."""
    s = tl.sum(parts, axis=0).to(dtype)
    spread = tl.where(_members(segments, token)[:, :, None], s[:, None, :], 0.0)
    return spread.reshape(token.shape[0], 16 * TOGETHER)


@triton.jit
def _await_arrivals(shrinkers, number_ptr, arrived_ptr, S_PARTS: tl.constexpr, MODULES: tl.constexpr):
    """Wait until the first half is there."""
    awaited = tl.minimum(shrinkers, tl.load(number_ptr) * (MODULES * S_PARTS))
    if awaited > 0:
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < awaited:
            pass


@triton.jit
def adapted_tile(
    acc, segments, adapters, shrinkers, arrived_ptr, row, token, num_tokens, first_module, last_module,
    S_PARTS: tl.constexpr, SUMS: tl.constexpr, LARGEST: tl.constexpr, MODULES: tl.constexpr, PAGES: tl.constexpr,
    PAGE: tl.constexpr, FIELDS: tl.constexpr, TOGETHER: tl.constexpr, BOTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc`` [rows, tokens] plus what adapters add to it: of outputs ``row`` [rows], all of the modules from
    ``first_module`` to ``last_module``, and of any ``token`` [tokens]. ``segments`` are the first ones. With an
    ``arrived_ptr`` programs of this launch make the first half. ``BOTH``: rows are of the modules 0 and 1, by
    halves."""
    s_ptr, of_token_ptr, memory_ptr, pages_ptr, places_ptr, _, _, _, number_ptr, second_row, third_row = adapters
    distance = num_tokens.to(tl.int64) * (MODULES * LARGEST)
    sums = s_ptr + token.to(tl.int64)[:, None] * (MODULES * LARGEST) + tl.arange(0, 16)[None, :]
    number = tl.load(number_ptr)
    weights = rows_of_b(segments, adapters, row, 0, PAGES, PAGE, TOGETHER)
    if arrived_ptr is not None:
        _await_arrivals(shrinkers, number_ptr, arrived_ptr, S_PARTS, MODULES)
    if number > FEW_TURNS_OF_B * TOGETHER:
        acc += expanded(
            row, token, num_tokens, s_ptr, of_token_ptr, memory_ptr, pages_ptr, places_ptr, second_row, third_row,
            first_module, last_module, S_PARTS, SUMS, LARGEST, MODULES, PAGES, PAGE, FIELDS,
        )  # fmt: skip
        number = 0
    segment, begin = 0, 0
    most = tl.max(segments[4], axis=0)
    while segment < number:
        now, mine, at = segments, weights, begin
        rank = tl.max(tl.where(_members(now, token), now[2][None, :], 0), axis=1)  # of each token
        held = at + tl.arange(0, 16)[None, :] < rank[:, None]
        parts = parts_of_sums(sums + (at + first_module * LARGEST), distance, held, S_PARTS)
        if BOTH:
            others = parts_of_sums(sums + (at + LARGEST), distance, held, S_PARTS)
        # While these are multiplied, the following ones are on their way.
        begin += 16
        if begin >= most:
            begin = 0
            segment += TOGETHER
            segments = segments_of(segment, adapters, FIELDS, TOGETHER)
            most = tl.max(segments[4], axis=0)
        weights = rows_of_b(segments, adapters, row, begin, PAGES, PAGE, TOGETHER)
        s = _spread(now, parts, token, mine.dtype, TOGETHER)
        if BOTH:
            second = (row >= second_row)[:, None]
            acc = tl.dot(tl.where(second, 0.0, mine), tl.trans(s), acc, input_precision=PRECISION)
            s = _spread(now, others, token, mine.dtype, TOGETHER)
            acc = tl.dot(tl.where(second, mine, 0.0), tl.trans(s), acc, input_precision=PRECISION)
        else:
            module = module_of(row, second_row, third_row)[:, None]
            acc = tl.dot(tl.where(module == first_module, mine, 0.0), tl.trans(s), acc, input_precision=PRECISION)
            for more in range(first_module + 1, last_module + 1):
                parts = parts_of_sums(sums + (at + more * LARGEST), distance, held, S_PARTS)
                s = _spread(now, parts, token, mine.dtype, TOGETHER)
                acc = tl.dot(tl.where(module == more, mine, 0.0), tl.trans(s), acc, input_precision=PRECISION)
    return acc
