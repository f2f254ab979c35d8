"""Gate and up products of prompts with their activation, for Hopper.

Power bounds steps of prompts: what the activation saves, writing both products and reading them again, the GPU has for
others. A tile has 256 tokens and 96 gates with what they multiply, as many accumulators as registers hold, so that
tokens and weights come from the L2 cache as rarely as they can without multicasts. Two warpgroups multiply, each of 128
tokens, out of shared memory; one warp keeps its stages filled.

Tiles come in bands: those of some tokens and all weights before those of others. So the L2 cache holds a band's tokens,
and all weights pass by once for each band.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.target import target_of
from pagebus.kernels.common.triton import LayoutDescriptor, gl, gluon, hopper
from pagebus.kernels.specialized.hopper_gemm import _store, copy_box, rows_of, zeros_of

DEPTH, TOKENS = 64, 256
"""Inputs of a stage, and tokens of a tile."""
PIECES = (128, 64)
"""Rows of weights of an instruction, half of them gates; together those of a tile."""
ROWS = sum(PIECES)
STAGES = 4
LAUNCH_REGISTERS, REGISTERS, LOADING_REGISTERS = 168, 240, 24


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Launch shape: a ``band`` has so many tiles of 256 tokens. K is never cut."""

    band: int = 8
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
    x, weights, x_shared, w_shared, full, empty, num_tiles, token_tiles, row_tiles, band, num_rows, size,
    ROWS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp, which waits for the kernels before this one on behalf of all."""
    TOKENS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    stage = 0
    phase = 1  # what was never filled counts as empty
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, row_tile = _place_of(tile, token_tiles, row_tiles, band)
        for k in range(0, size, DEPTH):
            hopper.mbarrier.wait(empty.index(stage), phase)
            hopper.mbarrier.expect(full.index(stage), 2 * DEPTH * (ROWS + TOKENS))
            copy_box(x, token_tile * TOKENS, k, full.index(stage), x_shared.index(stage))
            row = row_tile * (ROWS // 2)
            for piece in gl.static_range(len(weights)):
                weight, shared = weights[piece], w_shared[piece]
                for half in gl.static_range(2):
                    place = row + half * (num_rows // 2)
                    copy_box(weight, place, k, full.index(stage), shared.index(2 * stage + half))
                row += weight.block_shape[0]
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _begin_stage(accs, tokens, w_shared, stage, STAGES: gl.constexpr):
    """The products of 64 tokens, which have not ended."""
    sums = ()
    for piece in gl.static_range(len(w_shared)):
        rows = rows_of(w_shared[piece], stage, STAGES)
        sums += (hopper.warpgroup_mma(tokens, rows, accs[piece], is_async=True),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _multiply_tiles(
    GROUP: gl.constexpr, x_shared, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, band,
    num_tokens, num_rows, size, ROWS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """A multiplying warpgroup: the tokens of ``GROUP``, in two halves."""
    HALF: gl.constexpr = x_shared.shape[1]
    DEPTH: gl.constexpr = x_shared.shape[2]
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        token_tile, row_tile = _place_of(tile, token_tiles, row_tiles, band)
        wide = zeros_of(x_shared.index(0), rows_of(w_shared[0], 0, STAGES))
        narrow = zeros_of(x_shared.index(0), rows_of(w_shared[1], 0, STAGES))
        first = (wide, narrow)
        second = (wide, narrow)
        for _ in range(0, size, DEPTH):
            hopper.mbarrier.wait(full.index(stage), phase)
            place = stage * 4 + GROUP * 2
            sums = _begin_stage(first, x_shared.index(place), w_shared, stage, STAGES)
            sums += _begin_stage(second, x_shared.index(place + 1), w_shared, stage, STAGES)
            done = hopper.warpgroup_mma_wait(num_outstanding=0, deps=sums)
            first = (done[0], done[1])
            second = (done[2], done[3])
            hopper.mbarrier.arrive(empty.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        token = (token_tile * 4 + GROUP * 2) * HALF
        column = row_tile * (ROWS // 2)
        for piece in gl.static_range(len(w_shared)):
            acc, others = first[piece], second[piece]
            _store(acc, bias_ptr, out_ptr, token, column, num_rows // 2, num_tokens, GATED, BIASED)
            _store(others, bias_ptr, out_ptr, token + HALF, column, num_rows // 2, num_tokens, GATED, BIASED)
            column += w_shared[piece].shape[1]


@gluon.jit(do_not_specialize=["num_tiles", "token_tiles", "row_tiles", "band", "num_tokens"])
def _prompts_kernel(
    x,  # descriptor of [T, K]
    weight0,  # descriptors of [N, K], one for each piece of a tile's rows
    weight1,
    bias_ptr,  # [N] if BIASED
    out_ptr,  # [T, N / 2]
    num_tiles,
    token_tiles,
    row_tiles,
    band,
    num_tokens,  # T
    num_rows,  # N
    size,  # K
    GATED: gl.constexpr,  # one of GATES
    BIASED: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of a multiplying thread
    LOADING_REGISTERS: gl.constexpr,
    PDL: gl.constexpr,
):
    weights = (weight0, weight1)
    TOKENS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    x_shared = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], x.layout)
    x_halves = x_shared._reinterpret(x.dtype, [STAGES * 4, TOKENS // 4, DEPTH], x.layout)
    w_shared = ()
    for piece in gl.static_range(len(weights)):
        w = weights[piece]
        w_shared += (gl.allocate_shared_memory(w.dtype, [STAGES * 2, w.block_shape[0], DEPTH], w.layout),)  # type: ignore[assignment]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    gl.warp_specialize([
        (_multiply_tiles, (
            0, x_halves, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, band,
            num_tokens, num_rows, size, ROWS, STAGES, GATED, BIASED,
        )),
        (_multiply_tiles, (
            1, x_halves, w_shared, full, empty, bias_ptr, out_ptr, num_tiles, token_tiles, row_tiles, band,
            num_tokens, num_rows, size, ROWS, STAGES, GATED, BIASED,
        )),
        (_load_tiles, (
            x, weights, x_shared, w_shared, full, empty, num_tiles, token_tiles, row_tiles, band, num_rows, size,
            ROWS, STAGES, PDL,
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
    weights = [LayoutDescriptor.from_tensor(weight, [piece // 2, DEPTH], layout) for piece in PIECES]
    target = target_of(x.device)
    assert target is not None
    num_tiles = token_tiles * row_tiles
    _prompts_kernel[(min(num_tiles, target.num_multiprocessors),)](
        LayoutDescriptor.from_tensor(x, [TOKENS, DEPTH], layout), *weights, out if bias is None else bias, out,
        num_tiles, token_tiles, row_tiles, config.band, num_tokens, num_rows, size,
        GATED=gated, BIASED=bias is not None, ROWS=ROWS, STAGES=STAGES, REGISTERS=REGISTERS,
        LOADING_REGISTERS=LOADING_REGISTERS, num_warps=4, maxnreg=LAUNCH_REGISTERS, **pdl(x.device),
    )  # fmt: skip
    return out
