"""Plans decode attention: distributes the rows of a step over a fixed grid, once per step, on the device, for all
layers.

The tiles of all rows are laid end to end, and every program gets an equal run of them. A long context is cut into as
many pieces as needed, and a short one shares a program with its neighbours. The grid depends on the device alone and
lengths are read on the device, so a captured CUDA graph serves any content.

Where a form (:mod:`pagebus.kernels.attention.forms`) says so, rows lie apart: no program gets the end of one row and
the beginning of the next. Rows are then cut more finely than tiles, so that the pieces fit the programs, and the last
tile of a piece is computed in part. Where lengths are such that a multiprocessor would get more tokens that way, rows
lie end to end all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagebus.kernels.attention.forms.launch import DecodeConfig
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.reach import first_seen
from pagebus.kernels.common.target import num_multiprocessors, target_of
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

FINEST = 16
"""Rows that lie apart are cut at multiples of so many tokens."""
MIN_TOKENS = 64
"""The fewest tokens of a program, if there are enough: merging a piece costs about as much as reading so many."""
ITEM_FIELDS = 8
MERGE_FIELDS = 4


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """R rows cut into at most I items for P programs per KV head, which compute them as ``config`` says.

    ``items`` [I, 8] int32: row, its slot, its length, first token, end, 1 if the row has other items too. They begin at
    multiples of ``cut`` tokens, and end there or where the row does.
    ``program_items`` [P + 1] int32: where a program's items begin; ``merges`` [M, 4] int32: row, first item and number
    of items of each row that has several (number 0: no more of them). ``partial`` [I, Hq, D] and ``lse`` [I, Hq]
    float32 hold results of items between the two kernels of one layer. ``settled``: plan and block tables were written
    before the kernel whose results the decode kernel waits for began, so that it may read them first. For that, some
    kernel between must wait before it lets its successor start: the embedding does (see `pagebus.kernels.common.pdl`).
    """

    num_rows: int
    config: DecodeConfig
    cut: int
    items: torch.Tensor
    program_items: torch.Tensor
    merges: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor
    settled: bool
    query_start: torch.Tensor | None = None
    queries: int = 1
    """Of rows that are runs: where their tokens begin [R + 1] int32, and the most tokens of one. For each item there
    are then results of so many queries [I, queries, Hq, D]."""

    @property
    def num_programs(self) -> int:
        return len(self.program_items) - 1


@triton.jit
def apart_share(
    first, length, total, share, programs, kv_heads, processors, TILE: tl.constexpr, CUT: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):  # fmt: skip
    """How many CUTs a piece has at most if rows, seen from token ``first`` on [R], lie apart; 0: they lie end to end,
    in a ``share`` of their ``total`` tiles for each program.

    What counts are the tokens of the busiest multiprocessor: programs are dealt out in turn."""
    FINER: tl.constexpr = TILE // CUT
    units = (length + CUT - 1) // CUT - first // CUT
    least = ((total + share - 1) // share * kv_heads + processors - 1) // processors * share * FINER + 1
    best = 0
    for fewer in tl.static_range(FINER):  # no program has more than end to end
        tried = tl.maximum(share * FINER - fewer, max(MIN_TOKENS // CUT, 1))
        pieces = tl.sum((units + tried - 1) // tried, axis=0)
        busiest = (pieces * kv_heads + processors - 1) // processors * tried
        better = (pieces <= programs) & (busiest < least)
        best, least = tl.where(better, tried, best), tl.where(better, busiest, least)
    return best


@triton.jit(
    do_not_specialize=[
        "lens_ptr",
        "slots_ptr",
        "query_start_ptr",
        "num_rows",
        "num_items",
        "num_merges",
        "programs",
        "window",
        "kv_heads",
        "processors",
    ]
)
def _plan_kernel(
    lens_ptr,  # [R]
    slots_ptr,  # [R]
    query_start_ptr,  # [R + 1] or None: rows have one query
    items_ptr,  # [I, 8]
    program_items_ptr,  # [P + 1]
    merges_ptr,  # [M, 4]
    num_rows,  # R
    num_items,  # I
    num_merges,  # M
    programs,  # P
    window,
    kv_heads,
    processors,
    TILE: tl.constexpr,
    CUT: tl.constexpr,  # less than a tile: rows may lie apart
    MIN_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b writes entries b * BLOCK... of all tables; each looks at all rows, instead of one for all."""
    row = tl.arange(0, BLOCK_ROWS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    length = tl.load(lens_ptr + row, mask=row < num_rows, other=0)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=0)
    count = 1
    if query_start_ptr is not None:
        count = tl.load(query_start_ptr + row + 1, mask=row < num_rows, other=0)
        count -= tl.load(query_start_ptr + row, mask=row < num_rows, other=0)
    first = tl.where(window != 0, tl.maximum(first_seen(length - count, window), 0), 0)
    first_unit, units, unit = first // TILE, (length + TILE - 1) // TILE - first // TILE, TILE
    total = tl.sum(units, axis=0)
    # Program p has the units from p * share on. Rounded up, a share leaves some programs without any, but the longest
    # would not be shorter otherwise, and rows are cut into fewer pieces.
    share = tl.maximum((total + programs - 1) // programs, max(MIN_TOKENS // TILE, 1))
    places = units
    if CUT < TILE:
        finer = apart_share(first, length, total, share, programs, kv_heads, processors, TILE, CUT, MIN_TOKENS)
        apart = finer > 0
        unit = tl.where(apart, CUT, TILE)
        first_unit = tl.where(apart, first // CUT, first_unit)
        units = tl.where(apart, (length + CUT - 1) // CUT - first_unit, units)
        share = tl.where(apart, finer, share)
        places = tl.where(apart, (units + share - 1) // share * share, units)
    end = tl.cumsum(places, axis=0)
    begin = end - places
    last_program = tl.maximum((tl.sum(places, axis=0) + share - 1) // share, 1) - 1
    first_program = tl.minimum(begin // share, last_program)
    count = tl.maximum((begin + units - 1) // share, first_program) - first_program + 1
    # A row of nothing has no item. They lie behind the others: one program would have them all, one after the other.
    count = tl.where(units > 0, count, 0)
    end_item = tl.cumsum(count, axis=0)
    first_item = end_item - count
    divided = (count > 1).to(tl.int32)

    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    # A program's first item: how many there are that belong to programs before it.
    before = index[:, None] - first_program[None, :]
    before = tl.sum(tl.minimum(tl.maximum(before, 0), count[None, :]), axis=1)
    tl.store(program_items_ptr + index, before, mask=index <= programs)

    mine = (first_item[None, :] <= index[:, None]) & (index[:, None] < end_item[None, :])  # at most one row per item
    place = index - tl.sum(tl.where(mine, first_item[None, :], 0), axis=1)
    row_units = tl.sum(tl.where(mine, units[None, :], 0), axis=1)
    row_length = tl.sum(tl.where(mine, length[None, :], 0), axis=1)
    item_begin = place * share + tl.sum(tl.where(mine, (first_program * share - begin)[None, :], 0), axis=1)
    item_end = item_begin + share
    item_begin, item_end = tl.maximum(item_begin, 0), tl.minimum(item_end, row_units)
    offset = tl.sum(tl.where(mine, first_unit[None, :], 0), axis=1)
    target = items_ptr + index * 8
    mask = index < num_items
    tl.store(target, tl.sum(tl.where(mine, row[None, :], 0), axis=1), mask=mask)
    tl.store(target + 1, tl.sum(tl.where(mine, slot[None, :], 0), axis=1), mask=mask)
    tl.store(target + 2, row_length, mask=mask)
    tl.store(target + 3, (offset + item_begin) * unit, mask=mask)
    tl.store(target + 4, tl.minimum((offset + tl.maximum(item_end, item_begin)) * unit, row_length), mask=mask)
    tl.store(target + 5, tl.sum(tl.where(mine, divided[None, :], 0), axis=1), mask=mask)

    rank = tl.cumsum(divided, axis=0) - 1
    chosen = (rank[None, :] == index[:, None]) & (divided[None, :] > 0)  # at most one row per merge
    target = merges_ptr + index * 4
    tl.store(target, tl.sum(tl.where(chosen, row[None, :], 0), axis=1), mask=index < num_merges)
    tl.store(target + 1, tl.sum(tl.where(chosen, first_item[None, :], 0), axis=1), mask=index < num_merges)
    tl.store(target + 2, tl.sum(tl.where(chosen, count[None, :], 0), axis=1), mask=index < num_merges)


def plan_decodes(
    slots: torch.Tensor, context_lens: torch.Tensor, q_heads: int, kv_heads: int, head_dim: int, config: DecodeConfig,
    window: int, *, settled: bool = False, query_start: torch.Tensor | None = None, queries: int = 1,
) -> DecodePlan:  # fmt: skip
    """The plan of rows with these ``slots`` and ``context_lens`` [R] int32 (0: a row of nothing, which is left out);
    with ``query_start`` [R + 1] rows are runs of at most so many ``queries``."""
    assert slots.shape == context_lens.shape
    assert slots.is_contiguous()
    assert context_lens.is_contiguous()
    assert query_start is None or query_start.is_contiguous()
    tile, programs = config.tile, config.programs
    cut = min(FINEST, tile) if config.apart else tile
    num_rows, device = len(context_lens), context_lens.device
    num_items, num_merges = num_rows + programs - 1, min(num_rows, programs)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
    plan = DecodePlan(
        num_rows=num_rows,
        config=config,
        cut=cut,
        items=torch.empty((num_items, ITEM_FIELDS), **ints),
        program_items=torch.empty(programs + 1, **ints),
        merges=torch.empty((num_merges, MERGE_FIELDS), **ints),
        partial=torch.empty((num_items * queries, q_heads, head_dim), **floats),
        lse=torch.empty((num_items * queries, q_heads), **floats),
        settled=settled,
        query_start=query_start,
        queries=queries,
    )
    assert plan.partial.numel() < 2**31
    block_rows = max(256, next_power_of_2(num_rows))  # few kernels to compile
    # This runs once per step, so its instructions are never at hand: what counts is how few there are.
    block = 1 if target_of(device) is not None else 16
    _plan_kernel[(-(-max(num_items, programs + 1) // block),)](
        context_lens, slots, query_start, plan.items, plan.program_items, plan.merges, num_rows, num_items,
        num_merges, programs, window, kv_heads, num_multiprocessors(device),
        TILE=tile, CUT=cut, MIN_TOKENS=MIN_TOKENS,
        BLOCK_ROWS=block_rows, BLOCK=block, **pdl(device), num_warps=4 if block_rows <= 1024 else 16,
    )  # fmt: skip
    return plan
