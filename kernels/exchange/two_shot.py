"""Sums over ranks in two steps: each rank adds up its share of the rows and writes the sums to all others.

Rank r gets what others have of its share, adds the residual, and tells the new residual. The norm is then taken from
the same bits on all ranks. Each byte crosses the link twice (N - 1) / N times, where one step takes N - 1.

Large sums take turns: while the rows of one turn are added up, those of the next are on their way, and those before
are taken from the outbox. One signal a turn says that both are written, so the link has something to do at all times.
"""

from __future__ import annotations

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.exchange.rows import into_residual, own_part
from pagebus.kernels.exchange.waiting import begin_call, end_call, pointer_to, signal_all, slot_address, wait_all
from pagebus.kernels.layers.norm import norm_rows


@triton.jit
def _places(begin, owner, share, num_rows, numel, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Of a tile of the rows that are ``owner``'s: their numbers [TILE, 1], and, [TILE, BLOCK], where they are within
    that share, and within all rows, and which elements there are."""
    place, column = begin + tl.arange(0, TILE)[:, None], tl.arange(0, BLOCK)[None, :]
    row, within = tl.cast(owner * share + place, tl.int64), tl.cast(place, tl.int64) * SIZE + column
    offsets = row * SIZE + column
    mask = (place < tl.minimum(share, num_rows - owner * share)) & (column < SIZE) & (offsets < numel)
    return row, within, offsets, mask


@triton.jit
def _scatter(
    x_ptr, table_ptr, begin, end, step, stride_part, rank, numel, num_rows, share, INBOX: tl.constexpr,
    SLOT: tl.constexpr, WORLD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    TYPE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write what this rank has of others' shares into their inboxes."""
    for other in tl.static_range(1, WORLD):
        owner = (rank + other) % WORLD
        inbox = pointer_to(slot_address(table_ptr, owner, rank, INBOX, SLOT), TYPE)
        for place in range(begin, end, step):
            _, within, offsets, mask = _places(place, owner, share, num_rows, numel, SIZE, BLOCK, TILE)
            tl.store(inbox + within, own_part(x_ptr, offsets, mask, stride_part, TYPE, PARTS), mask=mask)


@triton.jit
def _reduce(
    x_ptr, residual_ptr, weight_ptr, weight, out_ptr, table_ptr, begin, end, step, stride_part, stride_residual, rank,
    numel, num_rows, share, eps, factor, INBOX: tl.constexpr, SLOT: tl.constexpr, OUTBOX: tl.constexpr,
    WORLD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Add up this rank's share, and write the sums, or the new residual, into the outboxes of all others."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    mine = tl.load(table_ptr + rank)
    for place in range(begin, end, step):
        row, within, offsets, mask = _places(place, rank, share, num_rows, numel, SIZE, BLOCK, TILE)
        own = own_part(x_ptr, offsets, mask, stride_part, TYPE, PARTS)
        if residual_ptr is not None:
            residual_at = residual_ptr + row * stride_residual + tl.arange(0, BLOCK)[None, :]
            residual = tl.load(residual_at, mask=mask, other=0.0)
        total = tl.zeros([TILE, BLOCK], tl.float32)
        for sender in tl.static_range(WORLD):
            inbox = pointer_to(mine + INBOX + tl.full((), sender, tl.int64) * SLOT, TYPE)
            told = tl.load(inbox + within, mask=mask & (sender != rank), other=0.0, cache_modifier=".cg")
            total += tl.where(sender == rank, own, told).to(tl.float32)
        x = total.to(TYPE)
        if residual_ptr is not None:
            x = into_residual(x, residual, factor, SCALED)
            tl.store(residual_at, x, mask=mask)
        for other in tl.static_range(1, WORLD):
            outbox = pointer_to(tl.load(table_ptr + (rank + other) % WORLD) + OUTBOX, TYPE)
            tl.store(outbox + offsets, x, mask=mask)
        if weight_ptr is not None:
            x = norm_rows(x, weight, eps, SIZE).to(TYPE)
        tl.store(out_ptr + offsets, x, mask=mask)


@triton.jit
def _collect(
    residual_ptr, weight_ptr, weight, out_ptr, table_ptr, begin, end, step, stride_residual, rank, numel, num_rows,
    share, eps, OUTBOX: tl.constexpr, WORLD: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Take what others have added up."""
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    outbox = pointer_to(tl.load(table_ptr + rank) + OUTBOX, TYPE)
    for other in tl.static_range(1, WORLD):
        owner = (rank + other) % WORLD
        for place in range(begin, end, step):
            row, _, offsets, mask = _places(place, owner, share, num_rows, numel, SIZE, BLOCK, TILE)
            x = tl.load(outbox + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            if residual_ptr is not None:
                tl.store(residual_ptr + row * stride_residual + tl.arange(0, BLOCK)[None, :], x, mask=mask)
            if weight_ptr is not None:
                x = norm_rows(x, weight, eps, SIZE).to(TYPE)
            tl.store(out_ptr + offsets, x, mask=mask)


@triton.jit(do_not_specialize=["rank", "num_rows", "share", "turns", "patience_ns"])
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
    turns,  # in which they are told
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
    TILE: tl.constexpr,  # rows at a time
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    PHASES: tl.constexpr,  # 1: scatter, 2: reduce, 4: collect; tests without GPUs run one after the other
    PDL: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    block, grid = tl.program_id(0), tl.num_programs(0)
    weight = 0.0
    if weight_ptr is not None:
        column = tl.arange(0, BLOCK)
        weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call, patience = begin_call(state_ptr, block, FORM)
    step = grid * TILE
    length = tl.cdiv(tl.cdiv(share, step), turns) * step  # rows of a share in a turn of all blocks
    for turn in range(turns + 2):
        begin = turn * length + block * TILE
        if PHASES & 1:
            _scatter(
                x_ptr, table_ptr, begin, tl.minimum((turn + 1) * length, share), step, stride_part, rank, numel,
                num_rows, share, INBOX, SLOT, WORLD, SIZE, BLOCK, TILE, TYPE, PARTS,
            )  # fmt: skip
        if PHASES == 7:  # noqa: SIM102
            if turn > 0:
                patience = wait_all(
                    table_ptr, state_ptr, rank, block, call, patience, patience_ns, FLAGS, FORM, WORLD, turn - 1
                )
        if PHASES & 2:  # noqa: SIM102
            if turn > 0:
                _reduce(
                    x_ptr, residual_ptr, weight_ptr, weight, out_ptr, table_ptr, begin - length,
                    tl.minimum(turn * length, share), step, stride_part, stride_residual, rank, numel, num_rows, share,
                    eps, factor, INBOX, SLOT, OUTBOX, WORLD, SIZE, BLOCK, TILE, PARTS, SCALED,
                )  # fmt: skip
        if PHASES == 7:  # noqa: SIM102
            if turn <= turns:
                signal_all(table_ptr, rank, block, call, FLAGS, WORLD, turn)
        if PHASES & 4:  # noqa: SIM102
            if turn > 1:
                _collect(
                    residual_ptr, weight_ptr, weight, out_ptr, table_ptr, begin - 2 * length,
                    tl.minimum((turn - 1) * length, share), step, stride_residual, rank, numel, num_rows, share, eps,
                    OUTBOX, WORLD, SIZE, BLOCK, TILE,
                )  # fmt: skip
    if PHASES & 4:
        end_call(state_ptr, call, block, grid, FORM)
