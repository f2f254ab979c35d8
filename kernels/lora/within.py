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

from pagebus.kernels.common.pdl import gdc_wait
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import constant, next_power_of_2, tl, triton
from pagebus.kernels.lora.expand import Expansion, expanded, module_of
from pagebus.kernels.lora.pages import COLUMNS, PLACE_FIELDS, RANKS, PagedTable, elements
from pagebus.kernels.lora.plan import AdapterPlan
from pagebus.kernels.lora.shrink import block_of, prefetch, rows_of_a

MOST_PARTS = 4
"""Parts of K that programs multiply apart, each of every fourth block."""
MOST_TOGETHER, MOST_NUMBERS, LARGE_TILE = 8, 64, 64
"""Segments that a tile multiplies with B at a time, if a thread holds no more than so many numbers of B or of s; half
as many in tiles of more tokens than that."""
FEW_TURNS = 4
"""Where programs that find a free multiprocessor make the first half in so many turns, there are no others."""
FEW_SEGMENTS, NUMBERS_AT_A_TIME = constant(16), constant(1024)
"""Of up to so many segments B is called into the L2 cache, so many numbers at a time."""

SHARED_BYTES, RESERVED = 228 << 10, 8 << 10
"""Of a multiprocessor, and what a program takes besides its tiles."""

POINTERS = (
    "s_ptr", "of_token_ptr", "adapted_ptr", "memory_ptr", "pages_ptr", "places_ptr", "scales_ptr", "first_ptr",
    "count_ptr", "adapter_ptr", "number_ptr", "arrived_ptr",
)  # fmt: skip
NUMBERS = (
    "stride_adapted", "second_row", "third_row", "shrinkers", "turn", "S_PARTS", "SUMS", "LARGEST", "MODULES", "PAGES",
    "PAGE", "FIELDS", "CONSTANTS", "TOGETHER", "ONE", "TOKENS", "SHARE",
)  # fmt: skip


def within(x: torch.Tensor, table: PagedTable, plan: AdapterPlan) -> Expansion | None:
    """What a product of tiles adds to them, both halves, of x [T, K]; None: the plan has no count left for another
    product."""
    turn = None if plan.arrivals is None else plan.arrivals.take()
    if turn is None:
        return None
    assert x.stride(1) == 1
    assert x.dtype == table.memory.dtype
    parts = min(MOST_PARTS, -(-x.shape[1] // block_of(x.dtype)))
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
    together = 0 if x is None else min(MOST_TOGETHER, next_power_of_2(len(segments.adapter)), together)
    one = int(together > 0 and len(segments.adapter) == 1)
    return {
        "s_ptr": s, "of_token_ptr": plan.of_token, "adapted_ptr": x, "memory_ptr": table.memory,
        "pages_ptr": table.pages, "places_ptr": table.places, "scales_ptr": table.scales,
        "first_ptr": segments.first_token, "count_ptr": segments.count, "adapter_ptr": segments.adapter,
        "number_ptr": segments.number, "arrived_ptr": arrived, "stride_adapted": 0 if x is None else x.stride(0),
        "second_row": table.bounds[0], "third_row": table.bounds[1], "shrinkers": shrinkers, "turn": turn,
        "S_PARTS": len(s), "SUMS": next_power_of_2(len(s)), "LARGEST": table.largest, "MODULES": modules,
        "PAGES": table.pages.shape[1], "PAGE": table.kernel_page, "FIELDS": PLACE_FIELDS,
        "CONSTANTS": table.constants, "TOGETHER": together, "ONE": one, "TOKENS": plan.tokens,
        "SHARE": min(int(COLUMNS), block_of(table.memory.dtype) // warps),
    }  # fmt: skip


@triton.jit
def shrink_within(
    index, shrinkers, x_ptr, s_ptr, memory_ptr, pages_ptr, places_ptr, scales_ptr, first_ptr, count_ptr, adapter_ptr,
    number_ptr, arrived_ptr, stride_x, num_tokens, num_rows, size, S_PARTS: tl.constexpr, LARGEST: tl.constexpr,
    MODULES: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr, CONSTANTS: tl.constexpr,
    TOKENS: tl.constexpr, SHARES: tl.constexpr, SHARE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first half: what program ``index`` of ``shrinkers`` does, and that it has done so."""
    row, token, column = tl.arange(0, 16), tl.arange(0, TOKENS), tl.arange(0, SHARE)
    share = tl.arange(0, SHARES)
    number = tl.load(number_ptr)
    units = number * (MODULES * S_PARTS)
    if index < units:
        if PDL:
            adapter = tl.load(adapter_ptr + index // (MODULES * S_PARTS))
            inputs = ((index % S_PARTS) * SHARES + share) * SHARE
            place, _ = rows_of_a(
                pages_ptr, adapter, tl.load(places_ptr + adapter * FIELDS + 3),
                tl.load(places_ptr + adapter * FIELDS + 2) * (index // S_PARTS % MODULES),
                tl.load(places_ptr + adapter * FIELDS + 1), tl.load(places_ptr + adapter * FIELDS), row[None, :],
                inputs[:, None], size, SHARE, PAGES, PAGE,
            )  # fmt: skip
            prefetch(memory_ptr + place, SHARE)
            if PAGES == 1:
                _prefetch_b(
                    index, tl.minimum(units, shrinkers), number, memory_ptr, pages_ptr, places_ptr, adapter_ptr,
                    num_rows, FIELDS,
                )  # fmt: skip
            gdc_wait()
        for unit in range(index, units, shrinkers):
            segment, module, part = unit // (MODULES * S_PARTS), unit // S_PARTS % MODULES, unit % S_PARTS
            adapter = tl.load(adapter_ptr + segment)
            first, count = tl.load(first_ptr + segment).to(tl.int64), tl.load(count_ptr + segment)
            rank = tl.load(places_ptr + adapter * FIELDS)
            rows = tl.load(places_ptr + adapter * FIELDS + 1)
            first_row = tl.load(places_ptr + adapter * FIELDS + 2) * module
            a = tl.load(places_ptr + adapter * FIELDS + 3)
            scale = tl.load(scales_ptr + adapter * MODULES + module)
            values = x_ptr + (first + token)[None, :, None] * stride_x + column[None, None, :]
            sums = s_ptr + (part * num_tokens.to(tl.int64) + first + token)[:, None] * (MODULES * LARGEST)
            for begin in range(0, rank, 16):
                acc = tl.zeros((SHARES, TOKENS, 16), tl.float32)
                for block in tl.range(part * SHARES, tl.cdiv(size, SHARE), S_PARTS * SHARES, num_stages=1):
                    inputs = (block + share) * SHARE
                    place, exists = rows_of_a(
                        pages_ptr, adapter, a, first_row, rows, rank, begin + row[None, :], inputs[:, None], size,
                        SHARE, PAGES, PAGE,
                    )  # fmt: skip
                    places = memory_ptr + place[:, :, None] + column[None, None, :]
                    weights = tl.load(places, mask=exists[:, :, None], other=0.0)
                    present = (token < count)[None, :, None] & (inputs[:, None] + column[None, :] < size)[:, None, :]
                    x = tl.load(values + inputs[:, None, None], mask=present, other=0.0)
                    acc = tl.dot(x, tl.permute(weights, (0, 2, 1)), acc, input_precision=PRECISION)
                s = tl.sum(acc, axis=0) * scale
                if CONSTANTS:
                    constant = tl.load(places_ptr + adapter * FIELDS + 5) - 1
                    s = tl.where((begin + row == constant)[None, :], tl.where(part == 0, 1.0, 0.0), s)
                mask = (token < count)[:, None] & (begin + row < rank)[None, :]
                tl.store(sums + module * LARGEST + begin + row[None, :], s, mask=mask)
        tl.debug_barrier()
        tl.atomic_add(arrived_ptr, 1, sem="release")


@triton.jit
def _prefetch_b(
    index, programs, number, memory_ptr, pages_ptr, places_ptr, adapter_ptr, num_rows, FIELDS: tl.constexpr
):
    """This program's part of the B of each segment into the L2 cache, if there are few."""
    if number <= FEW_SEGMENTS:
        for segment in range(0, number):
            adapter = tl.load(adapter_ptr + segment)
            b = memory_ptr + tl.load(pages_ptr + adapter) + tl.load(places_ptr + adapter * FIELDS + 4)
            last = tl.load(places_ptr + adapter * FIELDS) * num_rows - NUMBERS_AT_A_TIME
            for begin in range(index * (32 * NUMBERS_AT_A_TIME), last + 1, programs * (32 * NUMBERS_AT_A_TIME)):
                prefetch(b + tl.minimum(begin + tl.arange(0, 32) * NUMBERS_AT_A_TIME, last), NUMBERS_AT_A_TIME)


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
def await_arrivals(shrinkers, number_ptr, arrived_ptr, S_PARTS: tl.constexpr, MODULES: tl.constexpr):
    """Wait until the first half is there."""
    awaited = tl.minimum(shrinkers, tl.load(number_ptr) * (MODULES * S_PARTS))
    if awaited > 0:
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < awaited:
            pass


@triton.jit
def panels_of_b(row, segments, adapters, begin, PAGES: tl.constexpr, PAGE: tl.constexpr):
    """16 ranks of the B of each of the ``segments``, from ``begin`` on, side by side: [rows, 16 of each]."""
    _, _, _, adapter, rank, b = segments
    TWICE: tl.constexpr = adapter.shape[0]
    panel, eight = tl.arange(0, TWICE) % 2 * RANKS, tl.arange(0, RANKS)
    exists = (row >= 0)[:, None] & (begin + panel < rank)[None, :]
    offset = b[None, :] + row[:, None] * rank[None, :] + (begin + panel)[None, :]
    place = elements(adapters[3], adapter[None, :], offset, exists, PAGES, PAGE)
    place = tl.multiple_of(tl.where(exists, place, 0), [8, 8])
    weights = tl.load(adapters[2] + place[:, :, None] + eight[None, None, :], mask=exists[:, :, None], other=0.0)
    return weights.reshape(row.shape[0], TWICE * RANKS)


@triton.jit
def panels_ahead(row, segments, adapters, PAGES: tl.constexpr, PAGE: tl.constexpr, ONE: tl.constexpr):
    """The first panel of a single segment, loaded before a tile's sum, which hides how long that takes."""
    return panels_of_b(row, segments, adapters, 0, PAGES, PAGE) if ONE else row


@triton.jit
def adapted_tile(
    acc, segments, ahead, adapters, row, token, num_tokens, first_module, last_module, S_PARTS: tl.constexpr,
    SUMS: tl.constexpr, LARGEST: tl.constexpr, MODULES: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr,
    FIELDS: tl.constexpr, TOGETHER: tl.constexpr, ONE: tl.constexpr, BOTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``acc`` [rows, tokens] plus what adapters add to it: of outputs ``row`` [rows], all of the modules from
    ``first_module`` to ``last_module``, and of any ``token`` [tokens]. ``segments`` are the first ones. ``ONE``: there
    is one at most, and ``ahead`` is its first panel. ``BOTH``: the tile has outputs of both of two modules."""
    if TOGETHER == 0:
        s_ptr, of_token_ptr, memory_ptr, pages_ptr, places_ptr, _, _, _, _, second_row, third_row = adapters
        acc += expanded(
            row, token, num_tokens, s_ptr, of_token_ptr, memory_ptr, pages_ptr, places_ptr, second_row, third_row,
            first_module, last_module, S_PARTS, SUMS, LARGEST, MODULES, PAGES, PAGE, FIELDS,
        )  # fmt: skip
    elif ONE:
        if tl.load(adapters[8]) > 0:
            acc = _with_one(
                acc, segments, ahead, adapters, row, token, num_tokens, first_module, last_module, S_PARTS, LARGEST,
                MODULES, PAGES, PAGE, BOTH, PRECISION,
            )  # fmt: skip
    else:
        acc = _with_segments(
            acc, segments, adapters, row, token, num_tokens, first_module, last_module, S_PARTS, LARGEST, MODULES,
            PAGES, PAGE, FIELDS, TOGETHER, PRECISION,
        )  # fmt: skip
    return acc


@triton.jit
def _with_segments(
    acc, segments, adapters, row, token, num_tokens, first_module, last_module, S_PARTS: tl.constexpr,
    LARGEST: tl.constexpr, MODULES: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, FIELDS: tl.constexpr,
    TOGETHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s_ptr, _, memory_ptr, pages_ptr, _, _, _, _, number_ptr, second_row, third_row = adapters
    first, end, ranks, adapter, rank, b = segments
    column, panel, eight = tl.arange(0, 16), tl.arange(0, 2 * TOGETHER) % 2 * RANKS, tl.arange(0, RANKS)
    distance = num_tokens.to(tl.int64) * (MODULES * LARGEST)
    token_sums = s_ptr + token.to(tl.int64)[:, None] * (MODULES * LARGEST) + column[None, :]
    number = tl.load(number_ptr)
    for begin_segment in range(0, number, TOGETHER):
        member = (token[:, None] >= first[None, :]) & (token[:, None] < end[None, :])
        held = (tl.max(member.to(tl.int32), axis=1) > 0)[:, None]
        most = tl.max(rank, axis=0)
        for module in range(first_module, last_module + 1):
            mine = (module_of(row, second_row, third_row) == module)[:, None]
            for begin in tl.range(0, most, 16, num_stages=1):  # B comes to registers, 16 bytes at a time
                exists = mine & (begin + panel < rank)[None, :]
                offset = b[None, :] + row[:, None] * rank[None, :] + (begin + panel)[None, :]
                place = elements(pages_ptr, adapter[None, :], offset, exists, PAGES, PAGE)
                place = tl.multiple_of(tl.where(exists, place, 0), [8, 8])
                weights = tl.load(
                    memory_ptr + place[:, :, None] + eight[None, None, :], mask=exists[:, :, None], other=0.0
                ).reshape(row.shape[0], 16 * TOGETHER)
                sums = token_sums + module * LARGEST + begin
                s = tl.load(sums, mask=held, other=0.0, cache_modifier=".cg")
                for part in tl.static_range(1, S_PARTS):
                    s += tl.load(sums + part * distance, mask=held, other=0.0, cache_modifier=".cg")
                own = member[:, :, None] & (begin + column[None, :] < ranks[:, None])[None, :, :]
                spread = tl.where(own, s[:, None, :], 0.0).to(weights.dtype).reshape(token.shape[0], 16 * TOGETHER)
                acc = tl.dot(weights, tl.trans(spread), acc, input_precision=PRECISION)
        if begin_segment + TOGETHER < number:
            first, end, ranks, adapter, rank, b = segments_of(begin_segment + TOGETHER, adapters, FIELDS, TOGETHER)
    return acc


@triton.jit
def _with_one(
    acc, segments, ahead, adapters, row, token, num_tokens, first_module, last_module, S_PARTS: tl.constexpr,
    LARGEST: tl.constexpr, MODULES: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, BOTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`_with_segments` of a single one: B has been loaded ahead, and what modules wait for is loaded at once."""
    first, end, ranks, _, _, _ = segments
    distance = num_tokens.to(tl.int64) * (MODULES * LARGEST)
    sums = adapters[0] + token.to(tl.int64)[:, None] * (MODULES * LARGEST) + tl.arange(0, 16)[None, :]
    of_row = module_of(row, adapters[9], adapters[10])[:, None]
    member = (token[:, None] >= first[None, :]) & (token[:, None] < end[None, :])
    held, most = (tl.max(member.to(tl.int32), axis=1) > 0)[:, None], tl.max(ranks, axis=0)
    if BOTH:
        s, second = _added_up(sums, held, distance, S_PARTS), _added_up(sums + LARGEST, held, distance, S_PARTS)
        acc = _with_panels(acc, ahead, s, of_row == 0, member, ranks, 0, PRECISION)
        acc = _with_panels(acc, ahead, second, of_row == 1, member, ranks, 0, PRECISION)
    else:
        for module in range(first_module, last_module + 1):
            s = _added_up(sums + module * LARGEST, held, distance, S_PARTS)
            acc = _with_panels(acc, ahead, s, of_row == module, member, ranks, 0, PRECISION)
    for begin in tl.range(16, most, 16, num_stages=1):
        panels = panels_of_b(row, segments, adapters, begin, PAGES, PAGE)
        for module in range(first_module, last_module + 1):
            s = _added_up(sums + module * LARGEST + begin, held, distance, S_PARTS)
            acc = _with_panels(acc, panels, s, of_row == module, member, ranks, begin, PRECISION)
    return acc


@triton.jit
def _added_up(sums, held, distance, S_PARTS: tl.constexpr):
    """s [tokens, 16] of all parts."""
    s = tl.load(sums, mask=held, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, S_PARTS):
        s += tl.load(sums + part * distance, mask=held, other=0.0, cache_modifier=".cg")
    return s


@triton.jit
def _with_panels(acc, panels, s, mine, member, ranks, begin, PRECISION: tl.constexpr):
    """``acc`` plus the product of these ``panels`` with s [tokens, 16], in rows that are ``mine`` [rows, 1]."""
    own = member[:, :, None] & (begin + tl.arange(0, 16)[None, :] < ranks[:, None])[None, :, :]
    spread = tl.where(own, s[:, None, :], 0.0).to(panels.dtype).reshape(s.shape[0], 16 * member.shape[1])
    return tl.dot(tl.where(mine, panels, 0.0), tl.trans(spread), acc, input_precision=PRECISION)
