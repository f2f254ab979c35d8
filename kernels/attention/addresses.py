"""Addresses of a tile of keys and values in a paged cache, with as little arithmetic per token as possible."""

from __future__ import annotations

from pagebus.kernels.common.triton import tl, triton


@triton.jit
def tile_blocks(
    table_ptr, begin, end, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """The blocks of the tokens from ``begin`` on, one for each PART of them (which never lie in two; ``begin`` is a
    multiple): block 0 from ``end`` on."""
    blocks = ()
    first_ptr = table_ptr + begin // BLOCK_SIZE
    for part in tl.static_range(TILE // PART):
        place = begin + part * PART
        block_ptr = first_ptr + part if BLOCK_SIZE == PART else table_ptr + place // BLOCK_SIZE
        block = tl.load(block_ptr, mask=place < end, other=0)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005 - Triton unpacks no tuples
    return blocks


@triton.jit
def part_offsets(
    blocks, begin, stride_block, STRIDE_TOKEN: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """For each token of a tile, where the first token of its part lies in the cache [TILE]: a number per part, and no
    arithmetic per token."""
    part_of = tl.arange(0, TILE) // PART
    offsets = tl.zeros([TILE], tl.int64)
    for part in tl.static_range(TILE // PART):
        offset = tl.maximum(blocks[part], 0).to(tl.int64) * stride_block
        if BLOCK_SIZE > PART:
            offset += (begin + part * PART) % BLOCK_SIZE * STRIDE_TOKEN
        offsets = tl.where(part_of == part, offset, offsets)
    return offsets


@triton.jit
def pair_offsets(
    blocks, begin, stride_block, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """For each token of a tile, where its scales lie among those of a head: in 32 bits [TILE]."""
    token = tl.arange(0, TILE)
    block = tl.zeros([TILE], tl.int32)
    for part in tl.static_range(TILE // PART):
        block = tl.where(token // PART == part, blocks[part], block)
    inside = token % PART if BLOCK_SIZE == PART else (begin + token) % BLOCK_SIZE
    return tl.maximum(block, 0).to(tl.int64) * (stride_block // 4) + inside
