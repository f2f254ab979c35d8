"""Loads words of eight 4-bit codes and the tokens that they are multiplied by, for
`pagebus.kernels.specialized.hopper_widening`: what one warp does."""

from __future__ import annotations

from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait
from pagebus.kernels.common.triton import gl, gluon, hopper
from pagebus.kernels.specialized.hopper_gemm import copy_box, place_of


@gluon.jit
def _load_words(
    words, scale, zero, words_shared, scale_shared, zero_shared, arrived, slot, row, num_rows, column, stride_group,
    AHEAD: gl.constexpr, WIDTH: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Start to copy the words of a tile from ``column`` of 128 on, with scales and zeros."""
    HALVES: gl.constexpr = words_shared.shape[0] // AHEAD
    SCALES: gl.constexpr = scale_shared.shape[0] // words_shared.shape[0]
    PART: gl.constexpr = words_shared.shape[1]
    BYTES: gl.constexpr = HALVES * PART * (64 + 4 * SCALES + HALVES * ZEROS)
    hopper.mbarrier.expect(arrived.index(slot), BYTES)
    for half in gl.static_range(HALVES):
        place = row + half * (num_rows // 2)
        target = slot * HALVES + half
        copy_box(words, place, column * 16, arrived.index(slot), words_shared.index(target))
        for group in gl.static_range(SCALES):
            first = place
            if WIDTH:
                first += (column * 128 + group * (128 // SCALES)) // WIDTH * stride_group
            at = scale_shared.index((slot * SCALES + group) * HALVES + half)
            hopper.tma.async_copy_global_to_shared(scale, [first], arrived.index(slot), at)
            if ZEROS:  # of gate and up each as many as of both, at the places where they are in the tile
                first -= half * PART
                hopper.tma.async_copy_global_to_shared(zero, [first], arrived.index(slot), zero_shared.index(target))


@gluon.jit
def _load_tokens(x, token, k, x_shared, full, empty, stage, phase):
    """Into a stage, once that is empty."""
    BYTES: gl.constexpr = 2 * x.block_shape[0] * x.block_shape[1]
    hopper.mbarrier.wait(empty.index(stage), phase)
    hopper.mbarrier.expect(full.index(stage), BYTES)
    copy_box(x, token, k, full.index(stage), x_shared.index(stage))


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
    x, words, scale, zero, x_shared, words_shared, scale_shared, zero_shared, full, empty, arrived, taken, num_tiles,
    token_tiles, row_tiles, num_rows, part, stride_group, STAGES: gl.constexpr, AHEAD: gl.constexpr,
    EARLY: gl.constexpr, WIDTH: gl.constexpr, ZEROS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The loading warp: words ``EARLY`` steps ahead of tokens, of up to ``AHEAD`` slots. Tokens may be ahead of those
    that are multiplied by the steps that are left. It waits for the kernels before this one on behalf of all: nothing
    is multiplied or stored before its tokens are there."""
    TOKENS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    PART: gl.constexpr = words_shared.shape[1]
    steps = part // (2 * DEPTH)
    count = gl.cdiv(num_tiles - gl.program_id(0), gl.num_programs(0)) * steps
    stage = 0
    phase = 1  # what was never filled counts as empty
    slot = 0
    slot_phase = 1
    for step in range(-EARLY, count):
        ahead = step + EARLY
        if PDL and step == 0:
            gdc_launch_dependents()
            gdc_wait()
        if step >= 0:
            token_tile, _, split = place_of(
                gl.program_id(0) + step // steps * gl.num_programs(0), token_tiles, row_tiles
            )
            k = split * part + step % steps * (2 * DEPTH)
            _load_tokens(x, token_tile * TOKENS, k, x_shared, full, empty, stage, phase)
            stage, phase = next_of(stage, phase, STAGES)
            _load_tokens(x, token_tile * TOKENS, k + DEPTH, x_shared, full, empty, stage, phase)
            stage, phase = next_of(stage, phase, STAGES)
        if ahead < count:
            _, row_tile, split = place_of(
                gl.program_id(0) + ahead // steps * gl.num_programs(0), token_tiles, row_tiles
            )
            hopper.mbarrier.wait(taken.index(slot), slot_phase)
            _load_words(
                words, scale, zero, words_shared, scale_shared, zero_shared, arrived, slot, row_tile * PART, num_rows,
                split * steps + ahead % steps, stride_group, AHEAD, WIDTH, ZEROS,
            )  # fmt: skip
            slot, slot_phase = next_of(slot, slot_phase, AHEAD)
