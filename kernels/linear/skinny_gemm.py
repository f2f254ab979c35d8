"""Products of few tokens with a weight matrix on tensor cores: weights are the rows of the tiles, tokens the columns.

With few tokens, only the time to read the weights once counts. Tiles are therefore long in the weights and as narrow as
the tokens allow, and their rows are chosen so that every multiprocessor gets its share. Where that is not enough, K is
split over programs. The next kernel, the norm, adds up their float32 sums. Where the product computes half of the norm
itself, the last program of a tile adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagebus.kernels.coded.rounded_tiles import rounded_sum
from pagebus.kernels.coded.rounding import RoundedTokens
from pagebus.kernels.coded.tiles import coded_sum
from pagebus.kernels.coded.weights import WORDS, Coded, shape_of, tile_operands
from pagebus.kernels.common.pdl import gdc_launch_dependents, gdc_wait, pdl
from pagebus.kernels.common.triton import TensorDescriptor, next_power_of_2, tl, triton
from pagebus.kernels.layers.norm import Addition, HalfNorm
from pagebus.kernels.linear.epilogue import (
    PREFETCHED_TOKENS,
    add_bias,
    gated_tile,
    inverse_rms,
    load_squares,
    prefetch_rows,
    prefetched_numbers,
    split_gated,
    store_residual,
    store_tile,
    tile_modules,
    tile_places,
    tile_rows,
)
from pagebus.kernels.lora.expand import Expansion
from pagebus.kernels.lora.within import (
    adapted_tile,
    await_arrivals,
    free_programs,
    panels_ahead,
    segments_of,
    shrink_within,
    within_arguments,
)

PROMOTED_TOKENS = 64
"""Of tiles up to which sums of float8 are added in float32 step by step. Wider ones would wait for that: their sums
stay in Hopper's instructions, as the library's do, and are 0.1 to 0.3% off, where rounding to float8 is 2.6%."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Launch shape: ``rows`` (even) of weights by ``tokens``, ``depth`` of K at a time, K in ``splits`` parts.

    ``tma``: tiles come through the tensor memory accelerator (Hopper and later; ``rows`` is a power of two then).
    ``rounded``: tokens are rounded to the weights' 8 bits, each with a scale of its own, and are multiplied as such.
    """

    rows: int
    tokens: int
    depth: int
    stages: int
    warps: int
    splits: int = 1
    tma: bool = False
    rounded: bool = False

    def tiles(self, num_rows: int) -> int:
        """The number of tiles for so many rows of weights."""
        return -(-num_rows // self.rows)

    def part(self, num_inputs: int) -> int:
        """The columns of each part of K but the last, which may have fewer if tiles come through TMA: what lies beyond
        K is loaded as zeros."""
        return -(-num_inputs // self.depth // self.splits) * self.depth if self.tma else num_inputs // self.splits

    def fits(self, num_inputs: int) -> bool:
        """Whether K can be divided in this way."""
        if self.tma:
            return (self.splits - 1) * self.part(num_inputs) < num_inputs
        return self.splits == 1 or num_inputs % (self.splits * self.depth) == 0


@triton.jit(do_not_specialize=["num_tokens", "shrinkers", "turn"])
def _tiles_kernel(
    x_ptr,  # [T, K], or with TMA a descriptor of it
    weight_ptr,  # [N, K], or with TMA a descriptor of it
    prefetched_ptr,  # the weights themselves, [N, K], if PREFETCHED
    bias_ptr,  # [N] or None
    out_ptr,  # [T, N], or [T, N / 2] if GATED; several such sums [SPLITS, T, N] float32
    squares_ptr,  # None, or [PARTS, T]: x is divided by its root mean square
    residual_ptr,  # None, or [T, N]: the product is added to it, and out is the sum times norm
    norm_ptr,  # [N]
    new_squares_ptr,  # [tiles, T]: sums of squares of the residual
    split_sums_ptr,  # with SPLITS > 1, [SPLITS, T, N] float32: what the last program of a tile to be done adds up
    counters_ptr,  # of zeros: for each tile, how many of its splits are done
    stride_x,
    num_tokens,  # T
    num_rows,  # N
    size,  # K
    eps,
    scale_ptr,  # of quantized weights, as `Coded` has them; else None
    zero_ptr,
    low_ptr,
    whole_ptr,
    table_ptr,
    stride_scale,
    stride_group,
    tokens_ptr,  # None, or [T], with WIDTH [T, ceil(K / WIDTH)]: scales of x, which is of the weights' 8 bits
    s_ptr,  # None, or what adapters add: see `Expansion`
    of_token_ptr,
    adapted_ptr,  # [T, K]: x, if the first programs make s of it
    memory_ptr,
    pages_ptr,
    places_ptr,
    scales_ptr,
    first_ptr,
    count_ptr,
    adapter_ptr,
    number_ptr,
    arrived_ptr,
    stride_adapted,
    second_row,
    third_row,
    shrinkers,  # programs that make s
    turn,  # where they count themselves
    CODE: tl.constexpr,  # 0: weights are as x
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,  # weights and x are int8
    S_PARTS: tl.constexpr,  # of adapters, as the following
    SUMS: tl.constexpr,  # S_PARTS rounded up
    LARGEST: tl.constexpr,
    MODULES: tl.constexpr,
    PAGES: tl.constexpr,
    PAGE: tl.constexpr,
    FIELDS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    TOGETHER: tl.constexpr,  # segments that are multiplied with B at a time; 0: each token's own B, in registers
    ONE: tl.constexpr,  # segment at most, with TOGETHER
    TOKENS: tl.constexpr,  # of a segment, at most
    SHARES: tl.constexpr,  # of the inputs that a program multiplies with A at a time
    SHARE: tl.constexpr,  # inputs of it
    GATED: tl.constexpr,  # 0, or the number of an activation
    PARTS: tl.constexpr,  # of the norm's sums of squares
    BLOCK_PARTS: tl.constexpr,  # PARTS rounded up
    SPLITS: tl.constexpr,  # if > 1, K is a multiple of SPLITS * BLOCK_K, or tiles come through TMA
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,  # all rows of all tiles exist
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,  # ROWS rounded up
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PREFETCHED: tl.constexpr,
    PIECES: tl.constexpr,  # of a row that is prefetched, so that all threads take part
    PRECISION: tl.constexpr,
    UNPROMOTED: tl.constexpr,  # columns of float8 that are summed up in the 14 bits of Hopper's own sums; None: all
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(1), tl.program_id(2)
    if adapted_ptr is not None:
        if tile < shrinkers:
            if PDL:
                gdc_launch_dependents()
            if tl.program_id(0) == 0:
                shrink_within(
                    tile, shrinkers, adapted_ptr, s_ptr, memory_ptr, pages_ptr, places_ptr, scales_ptr, first_ptr,
                    count_ptr, adapter_ptr, number_ptr, arrived_ptr + turn, stride_adapted, num_tokens, num_rows, size,
                    S_PARTS, LARGEST, MODULES, PAGES, PAGE, FIELDS, CONSTANTS, TOKENS, SHARES, SHARE, PRECISION, PDL,
                )  # fmt: skip
            return
        # Splits of a tile are apart in one dimension, so that none comes before those that make s.
        split = (tile - shrinkers) // tl.cdiv(num_rows, ROWS)
        tile = (tile - shrinkers) % tl.cdiv(num_rows, ROWS)
    row, exists = tile_rows(tile, num_rows, ROWS, BLOCK_N, GATED)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    part = size // SPLITS
    if TMA and SPLITS > 1:
        part = tl.cdiv(tl.cdiv(size, BLOCK_K), SPLITS) * BLOCK_K
    begin = tl.multiple_of(split * part, BLOCK_K)  # or parts of K would be loaded in small pieces
    if not TMA and not CODE:
        first = weight_ptr + row.to(tl.int64)[:, None] * size + begin
        inputs = x_ptr + token.to(tl.int64)[:, None] * stride_x + begin + column[None, :]
    if residual_ptr is not None:
        norm = tl.load(norm_ptr + row)
    # Through TMA, gate and up are tiles of their own; otherwise, so that they may be small, two halves of one.
    PAIR: tl.constexpr = TMA and GATED
    if PAIR:
        pair_row = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        pair_row = tl.where(pair_row < num_rows // 2, pair_row, 0)
    SCALED: tl.constexpr = tokens_ptr is not None and not WIDTH
    if SCALED:
        scale = tl.load(scale_ptr + (pair_row if PAIR else row))[:, None]
        if PAIR:
            up_scale = tl.load(scale_ptr + num_rows // 2 + pair_row)[:, None]
    if s_ptr is not None:
        adapters = (
            s_ptr, of_token_ptr, memory_ptr, pages_ptr, places_ptr, first_ptr, count_ptr, adapter_ptr, number_ptr,
            second_row, third_row,
        )  # fmt: skip
        segments = segments_of(0, adapters, FIELDS, TOGETHER) if TOGETHER else adapters
        ahead = panels_ahead(pair_row if PAIR else row, segments, adapters, PAGES, PAGE, ONE)
        if PAIR:
            up_ahead = panels_ahead(num_rows // 2 + pair_row, segments, adapters, PAGES, PAGE, ONE)
    if PDL:
        gdc_launch_dependents()
        if PREFETCHED:
            if CODE >= WORDS:
                prefetch_rows(prefetched_ptr, row, tl.cdiv(size, 128) * 16, begin // 8, PREFETCHED, PIECES)
            else:
                prefetch_rows(prefetched_ptr, row, size, begin, PREFETCHED, PIECES)
        gdc_wait()
    if squares_ptr is not None:
        squares = load_squares(squares_ptr, token, num_tokens, PARTS, BLOCK_PARTS)
    if residual_ptr is not None:
        places, mask = tile_places(tile, token, num_tokens, num_rows, BLOCK_N, ROWS)
        residual = tl.load(residual_ptr + places, mask=mask, other=0.0)
    if SCALED:
        token_scale = tl.load(tokens_ptr + token, mask=token < num_tokens, other=0.0)[None, :]
    acc = tl.zeros((BLOCK_N // 2 if PAIR else BLOCK_N, BLOCK_M), tl.int32 if WHOLE and SCALED else tl.float32)
    up = acc
    present, exists = (token < num_tokens)[:, None], exists[:, None]
    if CODE:
        acc = coded_sum(
            acc, x_ptr + token.to(tl.int64)[:, None] * stride_x + begin, present, weight_ptr, scale_ptr, zero_ptr,
            low_ptr, whole_ptr, table_ptr, stride_scale, stride_group, row, exists, begin, part, size, CODE, HEIGHT,
            WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES, PRECISION, NATIVE,
        )  # fmt: skip
    elif tokens_ptr is not None and WIDTH:
        acc = rounded_sum(
            acc, x_ptr + token.to(tl.int64)[:, None] * stride_x + begin,
            tokens_ptr + token.to(tl.int64)[None, :] * tl.cdiv(size, WIDTH), token < num_tokens, weight_ptr, scale_ptr,
            stride_scale, stride_group, row, exists, begin, part, size, HEIGHT, WIDTH, EVEN_K, EVEN_N, BLOCK_K, STAGES,
            WHOLE,
        )  # fmt: skip
    else:
        for k in tl.range(0, part, BLOCK_K, num_stages=STAGES):
            if PAIR:
                x = x_ptr.load([tl.program_id(0) * BLOCK_M, k])
                acc = _dot(weight_ptr.load([tile * (BLOCK_N // 2), k]), x, acc, PRECISION, UNPROMOTED)
                up = _dot(weight_ptr.load([num_rows // 2 + tile * (BLOCK_N // 2), k]), x, up, PRECISION, UNPROMOTED)
            else:
                if TMA:
                    x = x_ptr.load([tl.program_id(0) * BLOCK_M, begin + k])
                    w = weight_ptr.load([tile * BLOCK_N, begin + k])
                elif EVEN_K:
                    x = tl.load(inputs + k, mask=present, other=0.0)
                    weights = first + column[None, :] + k
                    w = tl.load(weights) if EVEN_N else tl.load(weights, mask=exists, other=0.0)
                else:
                    inside = (column + k < part)[None, :]
                    x = tl.load(inputs + k, mask=present & inside, other=0.0)
                    w = tl.load(first + column[None, :] + k, mask=exists & inside, other=0.0)
                acc = _dot(w, x, acc, PRECISION, UNPROMOTED)
    if SCALED:
        acc = acc.to(tl.float32) * (scale * token_scale)
        if PAIR:
            up = up.to(tl.float32) * (up_scale * token_scale)
    if residual_ptr is not None and SPLITS > 1:
        split_sums_ptr += places
        distance = num_tokens.to(tl.int64) * num_rows
        tl.store(split_sums_ptr + split * distance, acc, mask=mask)
        tl.debug_barrier()
        counter = counters_ptr + tile * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counter, 0)
        acc = tl.load(split_sums_ptr, mask=mask, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):  # in a fixed order, whichever program is last
            acc += tl.load(split_sums_ptr + other * distance, mask=mask, other=0.0, cache_modifier=".cg")
    if s_ptr is not None:
        WHOLE_SUM: tl.constexpr = SPLITS == 1 or residual_ptr is not None
        if WHOLE_SUM or split == 0:  # of partial sums, to the first
            if adapted_ptr is not None:
                await_arrivals(shrinkers, number_ptr, arrived_ptr + turn, S_PARTS, MODULES)
            if PAIR:
                acc = adapted_tile(
                    acc, segments, ahead, adapters, pair_row, token, num_tokens, 0, 0, S_PARTS, SUMS, LARGEST, MODULES,
                    PAGES, PAGE, FIELDS, TOGETHER, ONE, False, PRECISION,
                )  # fmt: skip
                up = adapted_tile(
                    up, segments, up_ahead, adapters, num_rows // 2 + pair_row, token, num_tokens, 1, 1, S_PARTS, SUMS,
                    LARGEST, MODULES, PAGES, PAGE, FIELDS, TOGETHER, ONE, False, PRECISION,
                )  # fmt: skip
            else:
                acc = adapted_tile(
                    acc, segments, ahead, adapters, row, token, num_tokens,
                    *tile_modules(tile, num_rows, second_row, third_row, ROWS, GATED), S_PARTS, SUMS, LARGEST, MODULES,
                    PAGES, PAGE, FIELDS, TOGETHER, ONE, GATED > 0, PRECISION,
                )  # fmt: skip
    if squares_ptr is not None:
        inverse = inverse_rms(squares, size, eps)[None, :]
        acc *= inverse
        if PAIR:
            up *= inverse
    if PAIR:
        acc, up = add_bias(acc, bias_ptr, pair_row), add_bias(up, bias_ptr, num_rows // 2 + pair_row)
    else:
        acc = add_bias(acc, bias_ptr, row)
        if GATED:
            acc, up = split_gated(acc)
    if GATED:
        acc = gated_tile(acc, up, out_ptr.dtype.element_ty, GATED)
    if SPLITS > 1 and residual_ptr is None:
        out_ptr += split * num_tokens.to(tl.int64) * num_rows
    HALVES: tl.constexpr = 2 if GATED else 1
    if residual_ptr is None:
        store_tile(acc, tile, out_ptr, token, num_tokens, num_rows // HALVES, ROWS // HALVES)
    else:
        store_residual(
            acc, residual, norm, tile, residual_ptr, out_ptr, new_squares_ptr, token, num_tokens, num_rows, ROWS
        )  # fmt: skip


@triton.jit
def _dot(w, x, acc, PRECISION: tl.constexpr, UNPROMOTED: tl.constexpr):
    return tl.dot(w, tl.trans(x), acc, PRECISION, max_num_imprecise_acc=UNPROMOTED, out_dtype=acc.dtype)


def tiles_linear(
    x: torch.Tensor | RoundedTokens,
    weight: torch.Tensor | Coded,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: TileConfig,
    *,
    gated: int,
    before: HalfNorm | None = None,
    after: Addition | None = None,
    expansion: Expansion | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K], which may be quantized, plus bias [N], into out [T, N]; ``gated``: act(gate) * up,
    the activation of this number in `GATES`, into out [T, N / 2].

    With several splits, which have no bias, out is float32 [splits, T, N] and gets sums that have yet to be added up.
    ``before``: x is that of this norm. ``after``: the product is added to this residual, and out is the sum times the
    norm's weight. ``expansion``: what adapters add to the product. Where tokens are ``rounded``, they may be rounded
    already, each with one scale.
    """
    (num_rows, size), block = shape_of(weight), next_power_of_2(config.rows)
    x, numbers, tokens, meaning = tile_operands(x, weight, rounded=config.rounded)
    num_tokens = len(x)
    assert config.fits(size)
    assert not (config.tma and (meaning["CODE"] or meaning["WIDTH"]))
    assert not gated or (after is None and config.splits == 1)
    if config.splits > 1 and after is None:
        assert out.shape == (config.splits, num_tokens, num_rows)
        assert bias is None
    sources = _described(x, numbers, block, config, gated=gated) if config.tma else (x, numbers)
    last = size - (config.splits - 1) * config.part(size)
    prefetched = prefetched_numbers(numbers, config.splits, last) if num_tokens <= PREFETCHED_TOKENS else 0
    parts = 1 if before is None else len(before.squares)
    grid = (-(-num_tokens // config.tokens), config.tiles(num_rows), config.splits)
    shared = (block + config.tokens) * config.depth * config.stages * x.itemsize
    free = free_programs(grid[0] * grid[1] * grid[2], shared, x.device)
    adapted = within_arguments(expansion, block, config.tokens, config.warps, free)
    if adapted["shrinkers"]:
        grid = (grid[0], adapted["shrinkers"] + grid[1] * grid[2], 1)
    _tiles_kernel[grid](
        *sources,
        numbers if prefetched else None, bias, out,
        None if before is None else before.squares,
        *((None,) * 5 if after is None else after),
        x.stride(0), num_tokens, num_rows, size,
        0.0 if before is None else before.eps,
        **meaning,
        tokens_ptr=tokens,
        **adapted,
        SHARES=config.warps, WHOLE=numbers.dtype == torch.int8 and tokens is not None, GATED=gated,
        PARTS=parts, BLOCK_PARTS=next_power_of_2(parts), SPLITS=config.splits,
        EVEN_K=size % config.depth == 0, EVEN_N=config.rows == block and num_rows % block == 0,
        ROWS=config.rows, BLOCK_N=block, BLOCK_M=config.tokens, BLOCK_K=config.depth,
        STAGES=config.stages, TMA=config.tma, PREFETCHED=prefetched,
        PIECES=max(1, min(8, 32 * config.warps // block)),
        PRECISION="ieee",
        UNPROMOTED=config.depth if config.tokens <= PROMOTED_TOKENS and numbers.dtype == torch.float8_e4m3fn else None,
        num_warps=config.warps, **pdl(x.device),
    )  # fmt: skip
    return out


def _described(
    x: torch.Tensor, numbers: torch.Tensor, block: int, config: TileConfig, *, gated: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Both operands, for the tensor memory accelerator."""
    assert block == config.rows
    return (
        TensorDescriptor.from_tensor(x, [config.tokens, config.depth]),
        TensorDescriptor.from_tensor(numbers, [block // 2 if gated else block, config.depth]),
    )
