"""Plans decode attention: distributes the rows of a step over a fixed grid, once per step, on the device, for all
layers.

The tiles of all rows are laid end to end, and every program gets an equal run of them. A long context is cut into as
many pieces as needed, and a short one shares a program with its neighbours. The grid depends on the device alone and
lengths are read on the device, so a captured CUDA graph serves any content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.reach import first_seen
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import next_power_of_2, tl, triton

MIN_TOKENS = 64
"""The fewest tokens of a program, if there are enough: merging a piece costs about as much as reading so many."""
ITEM_FIELDS = 8
MERGE_FIELDS = 4


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """R rows cut into at most I items for P programs per KV head, in tiles of ``tile`` tokens.

    ``items`` [I, 8] int32: row, its slot, its length, first tile, end tile, 1 if the row has other items too;
    ``program_items`` [P + 1] int32: where a program's items begin; ``merges`` [M, 4] int32: row, first item and number
    of items of each row that has several (number 0: no more of them). ``partial`` [I, Hq, D] and ``lse`` [I, Hq]
    float32 hold results of items between the two kernels of one layer. ``settled``: plan and block tables were written
    before the kernel whose results the decode kernel waits for began, so that it may read them first. For that, some
    kernel between must wait before it lets its successor start: the embedding does (see `pagebus.kernels.common.pdl`).
    """

    num_rows: int
    tile: int
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


def programs_held(head_dim: int, group: int) -> int:
    """How many programs of 4 warps a multiprocessor holds at once. Tiles of 16 and more columns are multiplied by
    instructions of a warpgroup, which take queries and weights from shared memory as well."""
    if next_power_of_2(head_dim) > 128:
        return 2
    return 4 if group <= 8 else 3 if group <= 16 else 2


def most_registers(head_dim: int, group: int) -> int | None:
    """How many registers a thread of such a program may use, if the compiler has to be told."""
    return None if next_power_of_2(head_dim) > 128 else 65536 // (128 * programs_held(head_dim, group)) // 8 * 8


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
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
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
    first_tile = tl.where(window != 0, tl.maximum(first_seen(length - count, window), 0), 0) // TILE
    tiles = (length + TILE - 1) // TILE - first_tile
    end = tl.cumsum(tiles, axis=0)
    begin = end - tiles
    total = tl.sum(tiles, axis=0)
    # Program p has the tiles from p * share on. Rounded up, a share leaves some programs without any, but the longest
    # would not be shorter otherwise, and rows are cut into fewer pieces.
    share = tl.maximum((total + programs - 1) // programs, MIN_TILES)
    last_program = tl.maximum((total + share - 1) // share, 1) - 1
    first_program = tl.minimum(begin // share, last_program)
    count = tl.maximum((end - 1) // share, first_program) - first_program + 1
    # A row of nothing has no item. They lie behind the others: one program would have them all, one after the other.
    count = tl.where(tiles > 0, count, 0)
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
    row_tiles = tl.sum(tl.where(mine, tiles[None, :], 0), axis=1)
    item_begin = place * share + tl.sum(tl.where(mine, (first_program * share - begin)[None, :], 0), axis=1)
    item_end = item_begin + share
    item_begin, item_end = tl.maximum(item_begin, 0), tl.minimum(item_end, row_tiles)
    offset = tl.sum(tl.where(mine, first_tile[None, :], 0), axis=1)
    target = items_ptr + index * 8
    mask = index < num_items
    tl.store(target, tl.sum(tl.where(mine, row[None, :], 0), axis=1), mask=mask)
    tl.store(target + 1, tl.sum(tl.where(mine, slot[None, :], 0), axis=1), mask=mask)
    tl.store(target + 2, tl.sum(tl.where(mine, length[None, :], 0), axis=1), mask=mask)
    tl.store(target + 3, offset + item_begin, mask=mask)
    tl.store(target + 4, offset + tl.maximum(item_end, item_begin), mask=mask)
    tl.store(target + 5, tl.sum(tl.where(mine, divided[None, :], 0), axis=1), mask=mask)

    rank = tl.cumsum(divided, axis=0) - 1
    chosen = (rank[None, :] == index[:, None]) & (divided[None, :] > 0)  # at most one row per merge
    target = merges_ptr + index * 4
    tl.store(target, tl.sum(tl.where(chosen, row[None, :], 0), axis=1), mask=index < num_merges)
    tl.store(target + 1, tl.sum(tl.where(chosen, first_item[None, :], 0), axis=1), mask=index < num_merges)
    tl.store(target + 2, tl.sum(tl.where(chosen, count[None, :], 0), axis=1), mask=index < num_merges)


def plan_decodes(
    slots: torch.Tensor, context_lens: torch.Tensor, q_heads: int, head_dim: int, tile: int, programs: int, window: int,
    *, settled: bool = False, query_start: torch.Tensor | None = None, queries: int = 1,
) -> DecodePlan:  # fmt: skip
    """The plan of rows with these ``slots`` and ``context_lens`` [R] int32 (0: a row of nothing, which is left out);
    with ``query_start`` [R + 1] rows are runs of at most so many ``queries``."""
    num_rows, device = len(context_lens), context_lens.device
    num_items, num_merges = num_rows + programs - 1, min(num_rows, programs)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
    plan = DecodePlan(
        num_rows=num_rows,
        tile=tile,
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
        num_merges, programs, window,
        TILE=tile, MIN_TILES=max(1, MIN_TOKENS // tile),
        BLOCK_ROWS=block_rows, BLOCK=block, **pdl(device), num_warps=4 if block_rows <= 1024 else 16,
    )  # fmt: skip
    return plan
