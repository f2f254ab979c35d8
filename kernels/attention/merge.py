"""What both kernels over pages need: capped scores, and the sum of the results of keys that were cut into pieces."""

from __future__ import annotations

from pagebus.kernels.common.triton import tl, triton


@triton.jit
def cap_scores(scores, SOFTCAP: tl.constexpr):
    """Scores times log2(e), capped: c tanh(s / c) for each s, times log2(e) again."""
    CAP: tl.constexpr = SOFTCAP * 1.4426950408889634
    return CAP - 2.0 * CAP / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)


@triton.jit
def merge_pieces(
    partial_ptr,  # [.., D] float32: normalised results
    lse_ptr,  # [..] float32: log2 of their sums of exponentials; minus infinity: a piece in which nothing was seen
    part,  # the first piece
    count,
    stride,  # from a piece to the next
    HEAD_DIM: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The sum of ``count`` pieces of one query and head [BLOCK_DIM], each weighted by its share of the exponentials."""
    dim = tl.arange(0, BLOCK_DIM)
    highest = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_DIM], tl.float32)
    for begin in range(0, count, BLOCK_PIECES):
        piece = begin + tl.arange(0, BLOCK_PIECES)
        where = part + piece * stride
        lse = tl.load(lse_ptr + where, mask=piece < count, other=float("-inf"))
        mask = (piece < count)[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(partial_ptr + where[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        highest_now = tl.maximum(highest, tl.max(lse, axis=0))
        base = tl.where(highest_now == float("-inf"), 0.0, highest_now)
        weights = tl.exp2(lse - base)
        decay = tl.exp2(highest - base)
        acc = acc * decay + tl.sum(values * weights[:, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        highest = highest_now
    return acc / total
