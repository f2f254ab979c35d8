"""Loads words of eight 4-bit codes and the tokens that they are multiplied by, for
`pagebus.kernels.specialized.hopper_widening`: what one warp does."""

from __future__ import annotations

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from pagebus.kernels.common.triton import gl, gluon, hopper
from pagebus.kernels.specialized.hopper_gemm import copy_box, place_of


@gluon.jit
def _load_words(
    words, scale, zero, words_shared, scale_shared, zero_shared, arrived, stage, row, num_rows, column, stride_group,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Start to copy the words of a tile from ``column`` of 128 on, with scales and zeros."""
    HALVES: gl.constexpr = words_shared.shape[0] // STAGES
    SCALES: gl.constexpr = scale_shared.shape[0] // words_shared.shape[0]
    PART: gl.constexpr = words_shared.shape[1]
    BYTES: gl.constexpr = HALVES * PART * (64 + 4 * SCALES + HALVES * ZEROS)
    hopper.mbarrier.expect(arrived.index(stage), BYTES)
    for half in gl.static_range(HALVES):
        place = row + half * (num_rows // 2)
        target = stage * HALVES + half
        copy_box(words, place, column * 16, arrived.index(stage), words_shared.index(target))
        for group in gl.static_range(SCALES):
            first = place
            if WIDTH:
                first += (column * 128 + group * (128 // SCALES)) // WIDTH * stride_group
            at = scale_shared.index((stage * SCALES + group) * HALVES + half)
            hopper.tma.async_copy_global_to_shared(scale, [first], arrived.index(stage), at)
            if ZEROS:  # of gate and up each as many as of both, at the places where they are in the tile
                first -= half * PART
                hopper.tma.async_copy_global_to_shared(zero, [first], arrived.index(stage), zero_shared.index(target))


@gluon.jit
def _load_tokens(x, token, k, x_shared, full, stage):
    """128 columns of a tile's tokens, in two boxes."""
    DEPTH: gl.constexpr = x.block_shape[1]
    hopper.mbarrier.expect(full.index(stage), 4 * x.block_shape[0] * DEPTH)
    copy_box(x, token, k, full.index(stage), x_shared.index(2 * stage))
    copy_box(x, token, k + DEPTH, full.index(stage), x_shared.index(2 * stage + 1))


@gluon.jit
def next_of(stage, phase, COUNT: gl.constexpr):
    """Of a ring, and the phase of its barriers."""
    stage += 1
    if stage == COUNT:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def load_all_words(
    x, words, scale, zero, x_shared, words_shared, scale_shared, zero_shared, full, arrived, empty, num_tiles,
    token_tiles, row_tiles, num_rows, part, stride_group, STAGES: gl.constexpr, WIDTH: gl.constexpr,
    ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: steps of 128 columns into a ring of stages. The first words do not wait for the kernels before
    this one. All else waits on behalf of all warps: nothing is multiplied or stored before its tokens are there."""
    TOKENS: gl.constexpr = x.block_shape[0]
    PART: gl.constexpr = words_shared.shape[1]
    steps = part // 128
    count = gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0)) * steps
    early = gl.minimum(count, STAGES)
    for step in range(early):
        _, row_tile, split = place_of(gl.program_id(0) + step // steps * gl.num_programs(0), token_tiles, row_tiles)
        _load_words(
            words, scale, zero, words_shared, scale_shared, zero_shared, arrived, step, row_tile * PART, num_rows,
            split * steps + step % steps, stride_group, STAGES, WIDTH, ZEROS,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    stage = 0
    phase = 1  # what was never filled counts as empty
    for step in range(count):
        token_tile, row_tile, split = place_of(
            gl.program_id(0) + step // steps * gl.num_programs(0), token_tiles, row_tiles
        )
        column = split * steps + step % steps
        if step >= STAGES:
            hopper.mbarrier.wait(empty.index(stage), phase)
            _load_words(
                words, scale, zero, words_shared, scale_shared, zero_shared, arrived, stage, row_tile * PART, num_rows,
                column, stride_group, STAGES, WIDTH, ZEROS,
            )  # fmt: skip
        _load_tokens(x, token_tile * TOKENS, column * 128, x_shared, full, stage)
        stage, phase = next_of(stage, phase, STAGES)
