"""Gathering of some rows of all ranks, where the device knows which: the host launches the same whichever these are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.exchange.gather import BLOCK, MOST_BLOCKS
from pagebus.kernels.exchange.peers import SIGNAL, Peers
from pagebus.kernels.exchange.waiting import begin_call, end_call, pointer_to, signal_all, slot_address, wait_all


@triton.jit(do_not_specialize=["x_ptr", "wanted_ptr", "out_ptr", "rank", "num_rows", "patience_ns"])
def _gather_rows_kernel(
    x_ptr,  # [num_rows, own width] of 32 bits
    wanted_ptr,  # [num_rows] int32, the same on all ranks
    out_ptr,  # [num_rows, COLUMNS]
    table_ptr,
    state_ptr,
    stride_x,
    rank,
    num_rows,
    patience_ns,
    START: tl.constexpr,
    SLOT: tl.constexpr,
    FLAGS: tl.constexpr,
    FORM: tl.constexpr,
    WORLD: tl.constexpr,
    COLUMNS: tl.constexpr,  # of all ranks; rank r has those from r * COLUMNS // WORLD on
    WIDTH: tl.constexpr,  # the largest
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,  # as of the kernel of one step, in one_shot.py
    PDL: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    block, grid = tl.program_id(0), tl.num_programs(0)
    mine = tl.load(table_ptr + rank)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call, patience = begin_call(state_ptr, block, FORM)
    first_slot = (call & 1) * WORLD
    if PHASES & 1:
        first = rank * COLUMNS // WORLD
        width = (rank + 1) * COLUMNS // WORLD - first
        for row in range(num_rows):
            if tl.load(wanted_ptr + row) != 0:
                for start in range(block * BLOCK, WIDTH, grid * BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    x = tl.load(x_ptr + tl.cast(row, tl.int64) * stride_x + column, mask=column < width)
                    out = out_ptr + tl.cast(row, tl.int64) * COLUMNS + first + column
                    tl.store(out, x, mask=column < width)
                    for step in range(1, WORLD):
                        slot = slot_address(table_ptr, (rank + step) % WORLD, first_slot + rank, START, SLOT)
                        tl.store(pointer_to(slot, TYPE) + row * WIDTH + column, x, mask=column < width)
        if PHASES == 3:
            signal_all(table_ptr, rank, block, call, FLAGS, WORLD)
    if PHASES & 2:
        if PHASES == 3:
            patience = wait_all(table_ptr, state_ptr, rank, block, call, patience, patience_ns, FLAGS, FORM, WORLD)
        for row in range(num_rows):
            if tl.load(wanted_ptr + row) != 0:
                for start in range(block * BLOCK, WIDTH, grid * BLOCK):
                    column = start + tl.arange(0, BLOCK)
                    for step in range(1, WORLD):
                        sender = (rank + step) % WORLD
                        first = sender * COLUMNS // WORLD
                        width = (sender + 1) * COLUMNS // WORLD - first
                        slot = mine + START + tl.cast(first_slot + sender, tl.int64) * SLOT
                        told = tl.load(
                            pointer_to(slot, TYPE) + row * WIDTH + column, mask=column < width, cache_modifier=".cg"
                        )
                        out = out_ptr + tl.cast(row, tl.int64) * COLUMNS + first + column
                        tl.store(out, told, mask=column < width)
        end_call(state_ptr, call, block, grid, FORM)


def gather_rows_reference(xs: list[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """x [R, W] of each rank beside each other: [R, sum of W]; 0 in rows that are not ``wanted`` [R] int32."""
    return torch.cat(xs, dim=1) * (wanted != 0).unsqueeze(1)


def gather_rows(
    x: torch.Tensor, wanted: torch.Tensor, widths: Sequence[int], peers: Peers, phases: int = 3
) -> torch.Tensor:
    """As `gather_rows_reference`, of 32 bits, where rows that are not wanted stay as they were. ``widths`` are those of
    all ranks, which divide their sum evenly. Rows go in as many calls as they would need if all were wanted."""
    columns, width = sum(widths), max(widths)
    assert list(widths) == [(r + 1) * columns // peers.world - r * columns // peers.world for r in range(peers.world)]
    assert x.element_size() == 4
    assert x.stride(1) == 1
    assert wanted.is_contiguous()
    layout, out = peers.layout, torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    most = layout.limits.signal // 4 // width
    assert most
    grid = (min(MOST_BLOCKS, peers.max_blocks, -(-width // BLOCK)),)
    for start in range(0, len(x), most):
        rows = slice(start, start + most)
        _gather_rows_kernel[grid](
            x[rows], wanted[rows], out[rows], peers.table, peers.state, x.stride(0), peers.rank, len(x[rows]),
            peers.patience_ns, START=layout.signal.start, SLOT=layout.signal.slot, FLAGS=layout.signal_flags.start,
            FORM=SIGNAL, WORLD=peers.world, COLUMNS=columns, WIDTH=width, BLOCK=BLOCK, PHASES=phases, num_warps=8,
            **pdl(x.device),
        )  # fmt: skip
    return out
