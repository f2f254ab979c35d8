"""Products of 65 and more tokens with a weight matrix, for Hopper: some warps load, others multiply.

A program computes a tile of 64 tokens for each of its multiplying warpgroups by ``rows`` rows of the weights. One warp
keeps a ring of stages in shared memory filled through the tensor memory accelerator. Loads therefore continue between
tiles, and the first weights arrive while the previous kernel still runs. The number of rows need not be a power of two:
it is cut into pieces that are, each with its own accumulator, so that every multiprocessor gets its share of the
weights. The kernel is written in Gluon, because Triton assigns work to warps itself and allows only powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl, gluon, hopper

GROUPS, GROUP_TOKENS, DEPTH = 2, 64, 64
"""Multiplying warpgroups, tokens of each, and inputs of a stage: 128 bytes, which suit the tensor memory
accelerator."""
TOKENS = GROUPS * GROUP_TOKENS
SHARED_BYTES = 226 * 1024
"""Bytes of shared memory for stages. The rest of 228 kB suffices for a norm that may already wait on the same
multiprocessor."""
LOADING_REGISTERS = 24


@dataclass(frozen=True, slots=True)
class SpecializedConfig:
    """Launch shape: ``rows`` of weights (a sum of up to three powers of two from 16 to 256), K in ``splits`` parts."""

    rows: int
    splits: int = 1

    @property
    def pieces(self) -> tuple[int, ...]:
        """The powers of two that add up to ``rows``, the largest first."""
        return tuple(1 << bit for bit in reversed(range(4, 9)) if self.rows >> bit & 1)

    def stages(self, num_inputs: int) -> int:
        """The number of stages: as many as shared memory holds and a part of K has."""
        return min(SHARED_BYTES // (2 * DEPTH * (self.rows + TOKENS)), num_inputs // self.splits // DEPTH)

    @property
    def launch_registers(self) -> int:
        """Registers of each thread at launch: what a multiplying thread needs for accumulators, tokens and the rest,
        less what the loading threads give away. The compiler needs some more than the accumulator of the largest
        instruction."""
        share = (GROUPS * (self.rows // 2 + 56) + LOADING_REGISTERS) // (GROUPS + 1)
        return -(-max(share, self.pieces[0] // 2 + 32) // 8) * 8

    @property
    def registers(self) -> int:
        """Registers of a multiplying thread after the loading threads have given theirs away."""
        return ((GROUPS + 1) * self.launch_registers - LOADING_REGISTERS) // GROUPS // 8 * 8

    def fits(self, num_inputs: int) -> bool:
        """Whether K can be divided in this way."""
        return num_inputs % (self.splits * 2 * DEPTH) == 0


@gluon.jit
def place_of(tile, token_tiles, row_tiles):
    """The tokens, weight rows and part of K of a tile; neighbouring programs share their weights."""
    return tile % token_tiles, tile // token_tiles % row_tiles, tile // token_tiles // row_tiles


@gluon.jit
def copy_box(source, row, k, full, shared):
    """Start a copy of a box of ``source``, a descriptor, into ``shared``; ``full`` counts its bytes on arrival."""
    hopper.tma.async_copy_global_to_shared(source, [row, k], full, shared)


@gluon.jit
def _load_weights(weights, w_shared, full, first, second, row, num_rows, k, GATED: gl.constexpr):
    """All pieces of two stages, one under the other; ``GATED``: half of each from either half of the weights.

    The two are neighbours in memory and asked for one behind the other: it reads longer stretches faster.
    """
    HALVES: gl.constexpr = 2 if GATED else 1
    for piece in gl.static_range(len(weights)):
        weight, shared = weights[piece], w_shared[piece]
        for half in gl.static_range(HALVES):
            place = row + half * (num_rows // 2)
            copy_box(weight, place, k, full.index(first), shared.index(HALVES * first + half))
            copy_box(weight, place, k + weight.block_shape[1], full.index(second), shared.index(HALVES * second + half))
        row += weight.block_shape[0]


@gluon.jit
def _load_all(
    x, weights, x_shared, w_shared, full, empty, num_tiles, token_tiles, row_tiles, num_rows, part,
    ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: two stages at a time.

    It waits for the kernels before this one on behalf of all warps: nothing is multiplied or stored before its tokens
    are there.
    """
    WIDTH: gl.constexpr = ROWS // (2 if GATED else 1)
    TOKENS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    BYTES: gl.constexpr = 2 * DEPTH * (ROWS + TOKENS)
    EARLY: gl.constexpr = STAGES // 2 * 2
    _, row_tile, split = place_of(gl.program_id(0), token_tiles, row_tiles)
    for stage in range(0, EARLY, 2):
        hopper.mbarrier.expect(full.index(stage), BYTES)
        hopper.mbarrier.expect(full.index(stage + 1), BYTES)
        k = split * part + stage * DEPTH
        _load_weights(weights, w_shared, full, stage, stage + 1, row_tile * WIDTH, num_rows, k, GATED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count = 0
    first = 0
    phase = 1  # what was never filled counts as empty
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, row_tile, split = place_of(tile, token_tiles, row_tiles)
        for k in range(split * part, split * part + part, 2 * DEPTH):
            second = first + 1
            second_phase = phase
            if second == STAGES:
                second = 0
                second_phase ^= 1
            if count >= EARLY:
                hopper.mbarrier.wait(empty.index(first), phase)
                hopper.mbarrier.expect(full.index(first), BYTES)
                hopper.mbarrier.wait(empty.index(second), second_phase)
                hopper.mbarrier.expect(full.index(second), BYTES)
                _load_weights(weights, w_shared, full, first, second, row_tile * WIDTH, num_rows, k, GATED)
            copy_box(x, token_tile * TOKENS, k, full.index(first), x_shared.index(first))
            copy_box(x, token_tile * TOKENS, k + DEPTH, full.index(second), x_shared.index(second))
            count += 2
            first = second + 1
            phase = second_phase
            if first == STAGES:
                first = 0
                phase ^= 1


@gluon.jit
def activate_gate(x, GATED: gl.constexpr):
    """x / (1 + exp(-x)), or GELU by tanh (`activate`), without what only numbers beyond float16 and bfloat16 need."""
    power = x * (-2.302208198 - 0.10294324 * x * x if GATED == 2 else -1.4426950408889634)
    power = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], gl.float32, True, 1)
    return x * gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], gl.float32, True, 1)


@gluon.jit
def _store(
    acc, bias_ptr, out_ptr, token, first_column, num_columns, num_tokens, GATED: gl.constexpr, BIASED: gl.constexpr
):
    """One piece: ``acc`` [64, piece], its columns from ``first_column`` on of out [T, num_columns]."""
    if GATED:
        gate, up = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
        column = first_column + gl.arange(0, gate.shape[1], layout=gl.SliceLayout(0, gate.type.layout))
        if BIASED:
            inside = column < num_columns
            gate += gl.load(bias_ptr + column, mask=inside, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias_ptr + num_columns + column, mask=inside, other=0.0).to(gl.float32)[None, :]
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        gate = gate.to(dtype).to(gl.float32)
        result = activate_gate(gate, GATED).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
    else:
        result = acc
        column = first_column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        if BIASED:
            result += gl.load(bias_ptr + column, mask=column < num_columns, other=0.0).to(gl.float32)[None, :]
    token = token + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, result.type.layout))
    mask = (token < num_tokens)[:, None] & (column < num_columns)[None, :]
    place = out_ptr + token.to(gl.int64)[:, None] * num_columns + column[None, :]
    gl.store(place, result.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def zeros_of(inputs, rows):
    """The accumulator of ``inputs`` [64, DEPTH] times ``rows`` [DEPTH, piece]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows.shape[1], 16])
    return gl.full([inputs.shape[0], rows.shape[1]], 0.0, gl.float32, layout)


@gluon.jit
def rows_of(shared, stage, STAGES: gl.constexpr):
    """A piece of ``stage`` [DEPTH, piece], gate and up under each other."""
    height: gl.constexpr = shared.shape[0] // STAGES * shared.shape[1]
    together = shared._reinterpret(shared.dtype, [STAGES, height, shared.shape[2]], shared.layout)
    return together.index(stage).permute((1, 0))


@gluon.jit
def multiply_all(
    GROUP: gl.constexpr, x_shared, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles,
    num_tokens, num_rows, part, ROWS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr,
    SPLITS: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: the tokens of ``GROUP``."""
    HALVES: gl.constexpr = 2 if GATED else 1
    PIECES: gl.constexpr = len(w_shared)
    TOKENS: gl.constexpr = x_shared.shape[1]
    DEPTH: gl.constexpr = x_shared.shape[2]
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, row_tile, split = place_of(tile, token_tiles, row_tiles)
        accs = ()
        for piece in gl.static_range(PIECES):
            accs += (zeros_of(x_shared.index(0), rows_of(w_shared[piece], 0, STAGES)),)  # type: ignore[assignment]
        for _ in range(0, part, DEPTH):
            hopper.mbarrier.wait(full.index(stage), phase)
            left = x_shared.index(stage * GROUPS + GROUP).load(gl.DotOperandLayout(0, accs[0].type.layout, 2))  # type: ignore[misc]
            sums = ()
            for piece in gl.static_range(PIECES):
                # The same registers, whatever the width of the piece.
                inputs = gl.convert_layout(left, gl.DotOperandLayout(0, accs[piece].type.layout, 2))
                rows = rows_of(w_shared[piece], stage, STAGES)
                sums += (hopper.warpgroup_mma(inputs, rows, accs[piece], is_async=True),)  # type: ignore[assignment]
            accs = hopper.warpgroup_mma_wait(num_outstanding=0, deps=sums)
            if PIECES == 1:
                accs = (accs,)  # type: ignore[assignment]
            hopper.mbarrier.arrive(empty.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        out = out_ptr
        if SPLITS > 1:
            out += split * num_tokens.to(gl.int64) * num_rows
        token = (token_tile * GROUPS + GROUP) * TOKENS
        column = row_tile * (ROWS // HALVES)
        for piece in gl.static_range(PIECES):
            _store(accs[piece], bias_ptr, out, token, column, num_rows // HALVES, num_tokens, GATED, BIASED)
            column += w_shared[piece].shape[1]


@gluon.jit(do_not_specialize=["num_tiles", "token_tiles", "row_tiles", "num_tokens"])
def _specialized_kernel(
    x,  # descriptor of [T, K]
    weight0,  # descriptors of [N, K], one for each piece of a tile's rows, or None
    weight1,
    weight2,
    bias_ptr,  # [N] if BIASED
    out_ptr,  # [T, N], or [T, N / 2] if GATED; several such sums [SPLITS, T, N] float32
    num_tiles,
    token_tiles,
    row_tiles,
    num_tokens,  # T
    num_rows,  # N
    part,  # K / SPLITS
    GATED: gl.constexpr,
    BIASED: gl.constexpr,
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a multiplying thread
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    HALVES: gl.constexpr = 2 if GATED else 1
    if weight2 is not None:
        weights = (weight0, weight1, weight2)
    elif weight1 is not None:
        weights = (weight0, weight1)  # type: ignore[assignment]
    else:
        weights = (weight0,)  # type: ignore[assignment]
    TOKENS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    x_shared = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], x.layout)
    x_groups = x_shared._reinterpret(x.dtype, [STAGES * GROUPS, TOKENS // GROUPS, DEPTH], x.layout)
    w_shared = ()
    for piece in gl.static_range(len(weights)):
        w = weights[piece]
        w_shared += (gl.allocate_shared_memory(w.dtype, [STAGES * HALVES, w.block_shape[0], DEPTH], w.layout),)  # type: ignore[assignment]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=GROUPS)
    gl.warp_specialize([
        (multiply_all, (
            0, x_groups, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, num_tokens,
            num_rows, part, ROWS, STAGES, GROUPS, GATED, SPLITS, BIASED,
        )),
        (multiply_all, (
            1, x_groups, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, num_tokens,
            num_rows, part, ROWS, STAGES, GROUPS, GATED, SPLITS, BIASED,
        )),
        (_load_all, (
            x, weights, x_shared, w_shared, full, empty, num_tiles, token_tiles, row_tiles, num_rows, part, ROWS,
            STAGES, GATED, PDL,
        )),
    ], [4, 1], [REGISTERS, LOADING_REGISTERS])  # fmt: skip


def specialized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: SpecializedConfig,
    *,
    gated: int,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], plus bias [N], into out [T, N]; ``gated``: act(gate) * up, the activation
    of this number in `GATES`, into out [T, N / 2].

    With several splits, which have no bias, out is float32 [splits, T, N] and gets sums that have yet to be added up.
    """
    (num_tokens, size), num_rows = x.shape, weight.shape[0]
    assert config.fits(size)
    token_tiles, row_tiles = -(-num_tokens // TOKENS), -(-num_rows // config.rows)
    num_tiles = token_tiles * row_tiles * config.splits
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    halves = 2 if gated else 1
    weights = [LayoutDescriptor.from_tensor(weight, [piece // halves, DEPTH], layout) for piece in config.pieces]
    target = target_of(x.device)
    assert target is not None
    _specialized_kernel[(min(num_tiles, target.num_multiprocessors),)](
        LayoutDescriptor.from_tensor(x, [TOKENS, DEPTH], layout),
        *[*weights, None, None][:3],
        out if bias is None else bias,
        out,
        num_tiles,
        token_tiles,
        row_tiles,
        num_tokens,
        num_rows,
        size // config.splits,
        GATED=gated,
        BIASED=bias is not None,
        SPLITS=config.splits,
        ROWS=config.rows,
        STAGES=config.stages(size),
        GROUPS=GROUPS,
        REGISTERS=config.registers,
        LOADING_REGISTERS=LOADING_REGISTERS,
        num_warps=4,
        maxnreg=config.launch_registers,
        **pdl(x.device),
    )
    return out
