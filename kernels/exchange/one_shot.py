"""Sums over ranks in one step: each rank writes its part to all others, and all add up all parts.

Two forms. Small sums, ``push``, need neither barrier nor signal: a value that is not a hole has arrived. Larger ones,
``signal``, are followed by a word per block, which spares the receiver the looking and the clearing.
"""

from __future__ import annotations

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.exchange.rows import into_residual, norm_row, own_part
from pagebus.kernels.exchange.waiting import (
    begin_call,
    end_call,
    pointer_to,
    signal_all,
    slot_address,
    wait_all,
    wait_for_data,
)


@triton.jit(do_not_specialize=["rank", "num_rows", "patience_ns"])
def _one_shot_kernel(
    x_ptr,  # [num_rows, SIZE]; with PARTS > 1 float32 [PARTS, num_rows, SIZE]; the last row may be short
    residual_ptr,  # [num_rows, SIZE] or None: then the sum is the result
    weight_ptr,  # [SIZE] or None: that of the norm of the new residual
    out_ptr,  # [num_rows, SIZE], contiguous
    table_ptr,
    state_ptr,
    stride_part,
    stride_residual,
    rank,
    numel,
    num_rows,
    eps,
    factor,
    patience_ns,
    START: tl.constexpr,  # of the area, in bytes
    SLOT: tl.constexpr,
    FLAGS: tl.constexpr,
    FORM: tl.constexpr,
    HOLES: tl.constexpr,  # data is its own signal
    WORLD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,  # 32 bits
    PHASES: tl.constexpr,  # 1: tell, 2: take; tests without GPUs run one after the other
    PDL: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int32 if WIDE else tl.int16
    hole = tl.full((), -0x7FFF8000 if WIDE else -0x8000, BITS)
    block, grid = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mine = tl.load(table_ptr + rank)  # brings the table near
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call, patience = begin_call(state_ptr, block, FORM)
    first_slot = (call & 1) * WORLD
    if PHASES & 1:
        for row in range(block, num_rows, grid):
            offsets = tl.cast(row, tl.int64) * SIZE + column
            mask = (column < SIZE) & (offsets < numel)
            bits = own_part(x_ptr, offsets, mask, stride_part, TYPE, PARTS).to(BITS, bitcast=True)
            if HOLES:
                bits = tl.where(bits == hole, tl.full((), 0, BITS), bits)
            for step in tl.static_range(1, WORLD):
                slot = slot_address(table_ptr, (rank + step) % WORLD, first_slot + rank, START, SLOT)
                tl.store(pointer_to(slot, BITS) + offsets, bits, mask=mask)
        if not HOLES and PHASES == 3:
            signal_all(table_ptr, rank, block, call, FLAGS, WORLD)
    if PHASES & 2:
        if not HOLES and PHASES == 3:
            patience = wait_all(table_ptr, state_ptr, rank, block, call, patience, patience_ns, FLAGS, FORM, WORLD)
        for row in range(block, num_rows, grid):
            offsets = tl.cast(row, tl.int64) * SIZE + column
            mask = (column < SIZE) & (offsets < numel)
            own = own_part(x_ptr, offsets, mask, stride_part, TYPE, PARTS).to(BITS, bitcast=True)
            if HOLES:
                own = tl.where(own == hole, tl.full((), 0, BITS), own)
            if residual_ptr is not None:
                residual_at = residual_ptr + tl.cast(row, tl.int64) * stride_residual + column
                residual = tl.load(residual_at, mask=mask, other=0.0)
            total = tl.zeros([BLOCK], tl.float32)
            for sender in tl.static_range(WORLD):
                others = mask & (sender != rank)
                slot = mine + START + tl.cast(first_slot + sender, tl.int64) * SLOT
                pointers = pointer_to(slot, BITS) + offsets
                if HOLES:
                    bits, patience = wait_for_data(
                        pointers, others, hole, table_ptr, state_ptr, sender, call, block, patience, patience_ns,
                        FORM, WORLD,
                    )  # fmt: skip
                else:
                    bits = tl.load(pointers, mask=others, other=0, cache_modifier=".cg")
                total += tl.where(sender == rank, own, bits).to(TYPE, bitcast=True).to(tl.float32)
            x = total.to(TYPE)
            if residual_ptr is not None:
                x = into_residual(x, residual, factor, SCALED)
                tl.store(residual_at, x, mask=mask)
            if weight_ptr is not None:
                x = norm_row(x, weight, eps, SIZE).to(TYPE)
            tl.store(out_ptr + offsets, x, mask=mask)
        end_call(state_ptr, call, block, grid, FORM)
