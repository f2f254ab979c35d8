"""The newest token of a row inside the decode kernel: its heads are normalized, rotated and stored in the cache
there.
"""

from __future__ import annotations

from pagebus.kernels.common.pdl import gdc_wait
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.layers.rotary_kv_write import norm_halves, rotate_halves, store_halves, store_halves_int8


@triton.jit
def turn_group(
    token_ptr,  # [Hq + 2 Hkv, 2 * HALF]: the token's queries, keys, values
    kv_head,
    kv_heads,
    position,
    cos_sin_ptr,  # [max_position, 2 * HALF] float32
    q_norm_ptr,  # [2 * HALF] or None
    k_norm_ptr,  # [2 * HALF] or None
    eps,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,  # a power of two
    BLOCK_HEADS: tl.constexpr,
    WAIT: tl.constexpr,  # wait for the token, after all other loads were issued
):
    """Both halves [BLOCK_HEADS, HALF] of the queries of a KV head and, in row GROUP, of its key, normed and rotated."""
    member = tl.arange(0, BLOCK_HEADS)[:, None]
    # Of full shape, so that all loads give each thread the same elements.
    column = tl.arange(0, HALF)[None, :] + tl.zeros([BLOCK_HEADS, 1], tl.int32)
    is_key, mask = member == GROUP, (member <= GROUP) & (column >= 0)
    angle_ptr = cos_sin_ptr + position.to(tl.int64) * (2 * HALF) + column
    cos, sin = tl.load(angle_ptr, mask=mask, other=0.0), tl.load(angle_ptr + HALF, mask=mask, other=0.0)
    if q_norm_ptr is not None:
        first_weight = _weights(q_norm_ptr + column, k_norm_ptr + column, is_key, mask)
        second_weight = _weights(q_norm_ptr + HALF + column, k_norm_ptr + HALF + column, is_key, mask)
    head = tl.where(is_key, kv_heads * GROUP + kv_head, kv_head * GROUP + member)
    here = token_ptr + head * (2 * HALF) + column
    if WAIT:
        gdc_wait()
    first, second = tl.load(here, mask=mask, other=0.0), tl.load(here + HALF, mask=mask, other=0.0)
    if q_norm_ptr is not None:
        first, second = norm_halves(first, second, first_weight, second_weight, eps, HALF)
    return rotate_halves(first, second, cos, sin)


@triton.jit
def _weights(q_weights, k_weights, is_key, mask):
    return tl.where(is_key, tl.load(k_weights, mask=mask, other=0.0), tl.load(q_weights, mask=mask, other=0.0))


@triton.jit
def join_halves(first, second):
    """[BLOCK_HEADS, HALF] twice -> [2 * HALF, BLOCK_HEADS]."""
    return tl.join(first, second).permute(2, 1, 0).reshape(2 * first.shape[1], first.shape[0])


@triton.jit
def select_halves(first, second):
    """The same as `join_halves`. Behind a join Triton lays out the factors of a product of int8 for twice their width,
    and moves them about in registers."""
    half = tl.arange(0, 2)[None, :, None]
    both = tl.where(half == 0, first[:, None, :], second[:, None, :])
    return both.reshape(first.shape[0], 2 * first.shape[1])


@triton.jit
def cache_token(
    first,  # what turn_group gave
    second,
    value_ptr,  # [2 * HALF]: the token's value
    k_ptr,  # where the key goes
    v_ptr,  # where the value goes
    k_per_scale,  # None if the cache has the token's format
    v_per_scale,
    kept,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    LARGEST: tl.constexpr,  # of the cache's format
):
    """Store a token's key and value of one head if it is to be ``kept``; the program's own loads will find them."""
    row, column = tl.arange(0, first.shape[0])[:, None], tl.arange(0, HALF)[None, :]
    v_first = tl.load(value_ptr + column, mask=kept & (column >= 0), other=0.0)
    v_second = tl.load(value_ptr + HALF + column, mask=kept & (column >= 0), other=0.0)
    keys = k_ptr + column + tl.zeros([first.shape[0], 1], tl.int32)
    store_halves(keys, first, second, k_per_scale, kept & (row == GROUP) & (column >= 0), HALF, LARGEST)
    store_halves(v_ptr + column, v_first, v_second, v_per_scale, kept & (column >= 0), HALF, LARGEST)
    tl.debug_barrier()


@triton.jit
def cache_token_int8(
    first,  # what turn_group gave
    second,
    value_ptr,  # [2 * HALF]: the token's value
    k_ptr,  # where the key goes
    v_ptr,  # where the value goes
    scales_ptr,  # where the scales of both go
    kept,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
):
    """`cache_token` for a cache in int8."""
    row, one, column = tl.arange(0, first.shape[0]), tl.arange(0, 1), tl.arange(0, HALF)[None, :]
    v_mask = kept & (column >= 0)
    v_first = tl.load(value_ptr + column, mask=v_mask, other=0.0)
    v_second = tl.load(value_ptr + HALF + column, mask=v_mask, other=0.0)
    keys, is_key = k_ptr + column + tl.zeros([first.shape[0], 1], tl.int32), kept & (row == GROUP)
    store_halves_int8(keys, scales_ptr + 0 * row, first, second, is_key[:, None] & (column >= 0), is_key, 0, HALF)
    store_halves_int8(v_ptr + column, scales_ptr + 1 + one, v_first, v_second, v_mask, kept & (one >= 0), -128, HALF)
    tl.debug_barrier()
