"""Gate and up products of prompts with their activation, for Hopper.

Power bounds steps of prompts: what the activation saves, writing both products and reading them again, the GPU has for
others. A tile has 192 tokens and 128 gates with what they multiply: as many accumulators as registers hold, so that
tokens and weights come from the L2 cache as rarely as they can without multicasts. Two warpgroups multiply out of
shared memory, each 64 tokens by all rows of the tile, in the widest instructions there are, and half of the rows by the
last 64 tokens: so they read less than of squarer parts. One warp keeps the stages filled.

Tiles come in bands: those of some tokens and all weights before those of others. So the L2 cache holds a band's tokens,
and all weights pass by once for each band.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl, gluon, hopper
from pagebus.kernels.specialized.hopper_gemm import activate_gate, copy_box, zeros_of

DEPTH, BOX = 64, 64
"""Inputs of a stage; tokens, gates, or what these multiply, of a box in shared memory."""
TOKEN_BOXES, GATE_BOXES = 3, 2
"""Of a tile. There are as many boxes of what gates multiply."""
TOKENS, ROWS = TOKEN_BOXES * BOX, 2 * GATE_BOXES * BOX
STAGES = 4
LAUNCH_REGISTERS, REGISTERS, LOADING_REGISTERS = 168, 240, 24


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Launch shape: a ``band`` has this many tiles of 192 tokens. K is never cut."""

    band: int = 11
    splits: int = 1

    @property
    def rows(self) -> int:
        """Of weights, of a tile."""
        return ROWS

    def fits(self, num_inputs: int) -> bool:
        """Whether K can be divided into stages."""
        return num_inputs % DEPTH == 0 and self.splits == 1


@gluon.jit
def _place_of(tile, token_tiles, row_tiles, band):
    """The tokens and weight rows of a tile; neighbouring programs share their weights."""
    first = tile // (band * row_tiles) * band
    height = gl.minimum(token_tiles - first, band)
    inside = tile - first * row_tiles
    return first + inside % height, inside // height


@gluon.jit
def _load_tiles(
    x, weights, x_shared, w_shared, full, empty, num_tiles, token_tiles, row_tiles, band, width, size,
    STAGES: gl.constexpr, TOKEN_BOXES: gl.constexpr, GATE_BOXES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp, which waits for the kernels before this one on behalf of all. Of weights, each box of gates is
    followed by what they multiply."""
    BOX: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    BYTES: gl.constexpr = 2 * DEPTH * BOX * (TOKEN_BOXES + 2 * GATE_BOXES)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    stage = 0
    phase = 1  # what was never filled counts as empty
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, row_tile = _place_of(tile, token_tiles, row_tiles, band)
        for k in range(0, size, DEPTH):
            hopper.mbarrier.wait(empty.index(stage), phase)
            hopper.mbarrier.expect(full.index(stage), BYTES)
            for box in gl.static_range(TOKEN_BOXES):
                token = (token_tile * TOKEN_BOXES + box) * BOX
                copy_box(x, token, k, full.index(stage), x_shared.index(stage * TOKEN_BOXES + box))
            for box in gl.static_range(2 * GATE_BOXES):
                row = (row_tile * GATE_BOXES + box // 2) * BOX + box % 2 * width
                copy_box(weights, row, k, full.index(stage), w_shared.index(stage * 2 * GATE_BOXES + box))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _rows_of(shared, index, HEIGHT: gl.constexpr):
    """So many rows of weights [DEPTH, HEIGHT]."""
    count: gl.constexpr = shared.shape[0] * shared.shape[1] // HEIGHT
    rows = shared._reinterpret(shared.dtype, [count, HEIGHT, shared.shape[2]], shared.layout)
    return rows.index(index).permute((1, 0))


@gluon.jit
def _rounded(x, dtype: gl.constexpr):
    """In float32, what ``x`` is in ``dtype``: two neighbours in one instruction, as the compiler does not find."""
    if dtype == gl.bfloat16:
        ROUND: gl.constexpr = """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
        }"""
        return gl.inline_asm_elementwise(ROUND, "=f,=f,f,f", [x], gl.float32, True, 2)
    else:
        return x.to(dtype).to(gl.float32)


@gluon.jit
def _store(
    acc, bias_ptr, out_ptr, token, column, width, num_tokens, BOX: gl.constexpr, GATED: gl.constexpr,
    BIASED: gl.constexpr,
):  # fmt: skip
    """act(gate) * up of ``acc`` [64, boxes of both], box by box, into out [T, width] at ``token`` and ``column``."""
    if acc.shape[1] > 2 * BOX:
        left, right = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2]).permute(0, 2, 1).split()
        middle = column + left.shape[1] // 2
        _store(left, bias_ptr, out_ptr, token, column, width, num_tokens, BOX, GATED, BIASED)
        _store(right, bias_ptr, out_ptr, token, middle, width, num_tokens, BOX, GATED, BIASED)
    else:
        dtype: gl.constexpr = out_ptr.dtype.element_ty
        gate, up = acc.reshape([acc.shape[0], 2, BOX]).permute(0, 2, 1).split()
        columns = gl.arange(0, BOX, layout=gl.SliceLayout(0, gate.type.layout))
        inside = columns < width - column
        if BIASED:
            bias = bias_ptr + column + columns
            gate += gl.load(bias, mask=inside, other=0.0).to(gl.float32)[None, :]
            up += gl.load(bias + width, mask=inside, other=0.0).to(gl.float32)[None, :]
        result = activate_gate(_rounded(gate, dtype), GATED).to(dtype) * up.to(dtype)
        row = token + gl.arange(0, gate.shape[0], layout=gl.SliceLayout(1, gate.type.layout))
        rows = out_ptr + (row.to(gl.int64) * width + column)  # columns behind it are constants of instructions
        gl.store(rows[:, None] + columns[None, :], result, mask=(row < num_tokens)[:, None] & inside[None, :])


@gluon.jit
def _multiply_tiles(
    GROUP: gl.constexpr, x_shared, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, band,
    num_tokens, width, size, STAGES: gl.constexpr, TOKEN_BOXES: gl.constexpr, GATE_BOXES: gl.constexpr,
    GATED: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: all rows by the box of tokens ``GROUP``, and half of them by the last box of tokens."""
    BOX: gl.constexpr = x_shared.shape[1]
    DEPTH: gl.constexpr = x_shared.shape[2]
    ALL: gl.constexpr = 2 * GATE_BOXES * BOX
    HALF: gl.constexpr = ALL // 2
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, row_tile = _place_of(tile, token_tiles, row_tiles, band)
        wide = zeros_of(x_shared.index(0), _rows_of(w_shared, 0, ALL))
        narrow = zeros_of(x_shared.index(0), _rows_of(w_shared, 0, HALF))
        for _ in range(0, size, DEPTH):
            hopper.mbarrier.wait(full.index(stage), phase)
            mine, last = x_shared.index(stage * TOKEN_BOXES + GROUP), x_shared.index(stage * TOKEN_BOXES + 2)
            sums = (
                hopper.warpgroup_mma(mine, _rows_of(w_shared, stage, ALL), wide, is_async=True),
                hopper.warpgroup_mma(last, _rows_of(w_shared, stage * 2 + GROUP, HALF), narrow, is_async=True),
            )
            wide, narrow = hopper.warpgroup_mma_wait(num_outstanding=0, deps=sums)
            hopper.mbarrier.arrive(empty.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        token, column = token_tile * TOKEN_BOXES * BOX, row_tile * GATE_BOXES * BOX
        _store(wide, bias_ptr, out_ptr, token + GROUP * BOX, column, width, num_tokens, BOX, GATED, BIASED)
        column += GROUP * HALF // 2
        _store(narrow, bias_ptr, out_ptr, token + 2 * BOX, column, width, num_tokens, BOX, GATED, BIASED)


@gluon.jit(do_not_specialize=["num_tiles", "token_tiles", "row_tiles", "band", "num_tokens"])
def _prompts_kernel(
    x,  # descriptor of [T, K]
    weights,  # descriptor of [N, K]
    bias_ptr,  # [N] if BIASED
    out_ptr,  # [T, N / 2]
    num_tiles,
    token_tiles,
    row_tiles,
    band,
    num_tokens,  # T
    width,  # N / 2
    size,  # K
    GATED: gl.constexpr,  # one of GATES
    BIASED: gl.constexpr,
    TOKEN_BOXES: gl.constexpr,
    GATE_BOXES: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a multiplying thread
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    BOX: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    x_shared = gl.allocate_shared_memory(x.dtype, [STAGES * TOKEN_BOXES, BOX, DEPTH], x.layout)
    w_shared = gl.allocate_shared_memory(x.dtype, [STAGES * 2 * GATE_BOXES, BOX, DEPTH], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize([
        (_multiply_tiles, (
            0, x_shared, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, band, num_tokens,
            width, size, STAGES, TOKEN_BOXES, GATE_BOXES, GATED, BIASED,
        )),
        (_multiply_tiles, (
            1, x_shared, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, band, num_tokens,
            width, size, STAGES, TOKEN_BOXES, GATE_BOXES, GATED, BIASED,
        )),
        (_load_tiles, (
            x, weights, x_shared, w_shared, full, empty, num_tiles, token_tiles, row_tiles, band, width, size, STAGES,
            TOKEN_BOXES, GATE_BOXES, PDL,
        )),
    ], [4, 1], [REGISTERS, LOADING_REGISTERS])  # fmt: skip


def prompt_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: PromptConfig,
    *,
    gated: int,
) -> torch.Tensor:
    """act(gate) * up, where gate | up = x [T, K] times weight [N, K], plus bias [N], into out [T, N / 2]; ``gated`` is
    the activation's number in `GATES`."""
    (num_tokens, size), num_rows = x.shape, weight.shape[0]
    assert gated
    assert config.fits(size)
    token_tiles, row_tiles = -(-num_tokens // TOKENS), -(-num_rows // ROWS)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    target = target_of(x.device)
    assert target is not None
    num_tiles = token_tiles * row_tiles
    _prompts_kernel[(min(num_tiles, target.num_multiprocessors),)](
        LayoutDescriptor.from_tensor(x, [BOX, DEPTH], layout),
        LayoutDescriptor.from_tensor(weight, [BOX, DEPTH], layout),
        out if bias is None else bias, out, num_tiles, token_tiles, row_tiles, config.band, num_tokens, num_rows // 2,
        size, GATED=gated, BIASED=bias is not None, TOKEN_BOXES=TOKEN_BOXES, GATE_BOXES=GATE_BOXES, STAGES=STAGES,
        REGISTERS=REGISTERS, LOADING_REGISTERS=LOADING_REGISTERS, num_warps=4, maxnreg=LAUNCH_REGISTERS,
        **pdl(x.device),
    )  # fmt: skip
    return out
