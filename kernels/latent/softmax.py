"""The running softmax over tiles of latents: each tile is loaded once, as keys and as values.

Tiles are the left factors of both products, and queries and weights the right ones: tensor cores take 16 rows of the
left factor and 8 columns of the right, and the columns of a result, of 512 rows, are what fits into the registers.
"""

from __future__ import annotations

from pagebus.kernels.common.triton import tl, triton

LOG2_E = 1.4426950408889634
"""Scores are multiplied by it, so that exponentials are powers of two."""


@triton.jit
def load_queries(
    q_ptr, q_rope_ptr, token, head, exists, stride_qt, stride_qh, stride_rt, stride_rh,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_ROPE: tl.constexpr,
):  # fmt: skip
    """Both parts of the queries of columns with a ``token`` and a ``head`` each: [BLOCK_RANK, COLUMNS] and [BLOCK_ROPE,
    COLUMNS]; zeros where nothing ``exists``."""
    dim, turned = tl.arange(0, BLOCK_RANK)[:, None], tl.arange(0, BLOCK_ROPE)[:, None]
    q = q_ptr + (token * stride_qt + head * stride_qh)[None, :] + dim
    q_rope = q_rope_ptr + (token * stride_rt + head * stride_rh)[None, :] + turned
    q = tl.load(q, mask=exists[None, :] & (dim < RANK), other=0.0)
    return q, tl.load(q_rope, mask=exists[None, :] & (turned < ROPE), other=0.0)


@triton.jit
def attend_latents(
    q, q_rope, cache_ptr, table_ptr, position, begin, end, length, scale_log2, stride_block,
    STRIDE_TOKEN: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of columns of queries over the entries begin..end, of which column i sees those up to position[i]:
    normalised results [BLOCK_RANK, COLUMNS], and log2 of their sums of exponentials [COLUMNS], minus infinity where
    nothing was seen."""
    dim, turned = tl.arange(0, BLOCK_RANK)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    highest = tl.full([COLUMNS], float("-inf"), tl.float32)
    totals = tl.zeros([TILE, COLUMNS], tl.float32)  # sums over a tile's tokens need all warps: they are made last
    acc = tl.zeros([BLOCK_RANK, COLUMNS], tl.float32)
    place = begin + tl.arange(0, TILE)
    next_block = tl.load(table_ptr + place // BLOCK_SIZE, mask=place < length, other=0)
    for start in tl.range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        blocks = tl.maximum(next_block, 0).to(tl.int64)
        after = place + TILE  # block ids are loaded a tile ahead: loads that wait for loads take a stage
        next_block = tl.load(table_ptr + after // BLOCK_SIZE, mask=after < length, other=0)
        here = cache_ptr + (blocks * stride_block + place % BLOCK_SIZE * STRIDE_TOKEN)[:, None]
        inside = (place < length)[:, None]
        latent = tl.load(here + dim, mask=inside & (dim < RANK), other=0.0)
        shared = tl.load(here + RANK + turned, mask=inside & (turned < ROPE), other=0.0)
        scores = tl.dot(shared, q_rope, input_precision=PRECISION)
        scores = tl.dot(latent, q, scores, input_precision=PRECISION) * scale_log2
        scores = tl.where(place[:, None] <= position[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a column may have seen nothing yet
        weights = tl.exp2(scores - base[None, :])
        decay = tl.exp2(highest - base)
        totals = totals * decay[None, :] + weights
        weights = weights.to(latent.dtype)
        acc = tl.dot(tl.trans(latent), weights, acc * decay[None, :], input_precision=PRECISION)
        highest = new_highest
    total = tl.sum(totals, axis=0)
    total = tl.where(total > 0, total, 1.0)
    return acc / total[None, :], highest + tl.log2(total)
