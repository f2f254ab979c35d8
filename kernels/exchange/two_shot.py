"""Sums over ranks in two steps: each rank adds up its share of the rows and writes the sums to all others.

Rank r gets what others have of its share, adds the residual, and tells the new residual. The norm is then taken from
the same bits on all ranks. Each byte crosses the link twice (N - 1) / N times, where one step takes N - 1.
"""

from __future__ import annotations

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.exchange.rows import into_residual, norm_row, own_part
from pagebus.kernels.exchange.waiting import begin_call, end_call, pointer_to, signal_all, slot_address, wait_all

SCATTER, REDUCE, COLLECT = 1, 2, 4
"""The parts of a call, which tests without GPUs run one after the other."""


@triton.jit(do_not_specialize=["rank", "num_rows", "share", "patience_ns"])
def _two_shot_kernel(
    x_ptr,  # as of the kernel of one step, in one_shot.py
    residual_ptr,
    weight_ptr,
    out_ptr,
    table_ptr,
    state_ptr,
    stride_part,
    stride_residual,
    rank,
    numel,
    num_rows,
    share,  # rows of a rank, but the last ones' may be fewer
    eps,
    factor,
    patience_ns,
    INBOX: tl.constexpr,  # in bytes
    SLOT: tl.constexpr,
    OUTBOX: tl.constexpr,
    FLAGS: tl.constexpr,
    FORM: tl.constexpr,
    WORLD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    PHASES: tl.constexpr,
    PDL: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    block, grid = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mine = tl.load(table_ptr + rank)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call, patience = begin_call(state_ptr, block, FORM)
    if PHASES & 1:
        for step in tl.static_range(1, WORLD):
            owner = (rank + step) % WORLD
            inbox = pointer_to(slot_address(table_ptr, owner, rank, INBOX, SLOT), TYPE)
            for place in range(block, tl.minimum(share, num_rows - owner * share), grid):
                offsets = tl.cast(owner * share + place, tl.int64) * SIZE + column
                mask = (column < SIZE) & (offsets < numel)
                x = own_part(x_ptr, offsets, mask, stride_part, TYPE, PARTS)
                tl.store(inbox + tl.cast(place, tl.int64) * SIZE + column, x, mask=mask)
        if PHASES == 7:
            signal_all(table_ptr, rank, block, 2 * call - 1, FLAGS, WORLD)
            patience = wait_all(
                table_ptr, state_ptr, rank, block, 2 * call - 1, patience, patience_ns, FLAGS, FORM, WORLD
            )
    if PHASES & 2:
        for place in range(block, tl.minimum(share, num_rows - rank * share), grid):
            row = tl.cast(rank * share + place, tl.int64)
            offsets = row * SIZE + column
            mask = (column < SIZE) & (offsets < numel)
            own = own_part(x_ptr, offsets, mask, stride_part, TYPE, PARTS)
            if residual_ptr is not None:
                residual_at = residual_ptr + row * stride_residual + column
                residual = tl.load(residual_at, mask=mask, other=0.0)
            total = tl.zeros([BLOCK], tl.float32)
            for sender in tl.static_range(WORLD):
                inbox = pointer_to(mine + INBOX + tl.full((), sender, tl.int64) * SLOT, TYPE)
                told = tl.load(
                    inbox + tl.cast(place, tl.int64) * SIZE + column, mask=mask & (sender != rank), other=0.0,
                    cache_modifier=".cg",
                )  # fmt: skip
                total += tl.where(sender == rank, own, told).to(tl.float32)
            x = total.to(TYPE)
            if residual_ptr is not None:
                x = into_residual(x, residual, factor, SCALED)
                tl.store(residual_at, x, mask=mask)
            for step in tl.static_range(1, WORLD):
                outbox = pointer_to(tl.load(table_ptr + (rank + step) % WORLD) + OUTBOX, TYPE)
                tl.store(outbox + offsets, x, mask=mask)
            if weight_ptr is not None:
                x = norm_row(x, weight, eps, SIZE).to(TYPE)
            tl.store(out_ptr + offsets, x, mask=mask)
        if PHASES == 7:
            signal_all(table_ptr, rank, block, 2 * call, FLAGS, WORLD)
            patience = wait_all(table_ptr, state_ptr, rank, block, 2 * call, patience, patience_ns, FLAGS, FORM, WORLD)
    if PHASES & 4:
        outbox = pointer_to(mine + OUTBOX, TYPE)
        for step in tl.static_range(1, WORLD):
            owner = (rank + step) % WORLD
            for place in range(block, tl.minimum(share, num_rows - owner * share), grid):
                row = tl.cast(owner * share + place, tl.int64)
                offsets = row * SIZE + column
                mask = (column < SIZE) & (offsets < numel)
                x = tl.load(outbox + offsets, mask=mask, other=0.0, cache_modifier=".cg")
                if residual_ptr is not None:
                    tl.store(residual_ptr + row * stride_residual + column, x, mask=mask)
                if weight_ptr is not None:
                    x = norm_row(x, weight, eps, SIZE).to(TYPE)
                tl.store(out_ptr + offsets, x, mask=mask)
        end_call(state_ptr, call, block, grid, FORM)
