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
    kept,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,  # HALF rounded up to a power of two
    WAIT: tl.constexpr,  # wait for the token, after all other loads were issued
):
    """Both halves [BLOCK_HEADS, BLOCK_HALF] of the queries of a KV head, normed and rotated, and of its key: in row
    GROUP beside the queries, or [1, BLOCK_HALF] if these fill all rows. The latter is zero if it is not ``kept``."""
    APART: tl.constexpr = BLOCK_HEADS == GROUP
    member = tl.arange(0, BLOCK_HEADS)[:, None]
    # Of full shape, so that all loads give each thread the same elements.
    column = tl.arange(0, BLOCK_HALF)[None, :] + tl.zeros([BLOCK_HEADS, 1], tl.int32)
    is_key, mask = member == GROUP, (member <= GROUP) & in_half(column, HALF, BLOCK_HALF)
    if APART:
        key_column = tl.arange(0, BLOCK_HALF)[None, :]
        key_mask = kept & in_half(key_column, HALF, BLOCK_HALF)
        key_angle_ptr = cos_sin_ptr + position.to(tl.int64) * (2 * HALF) + key_column
        key_cos = tl.load(key_angle_ptr, mask=key_mask, other=0.0)
        key_sin = tl.load(key_angle_ptr + HALF, mask=key_mask, other=0.0)
        if k_norm_ptr is not None:
            first_key_weight = tl.load(k_norm_ptr + key_column, mask=key_mask, other=0.0)
            second_key_weight = tl.load(k_norm_ptr + HALF + key_column, mask=key_mask, other=0.0)
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
    if APART:
        key_here = token_ptr + (kv_heads * GROUP + kv_head) * (2 * HALF) + key_column
        first_key = tl.load(key_here, mask=key_mask, other=0.0)
        second_key = tl.load(key_here + HALF, mask=key_mask, other=0.0)
    if q_norm_ptr is not None:
        first, second = norm_halves(first, second, first_weight, second_weight, eps, HALF)
    first, second = rotate_halves(first, second, cos, sin)
    if APART:
        if k_norm_ptr is not None:
            first_key, second_key = norm_halves(first_key, second_key, first_key_weight, second_key_weight, eps, HALF)
        first_key, second_key = rotate_halves(first_key, second_key, key_cos, key_sin)
    else:
        first_key, second_key = first, second
    return first, second, first_key, second_key


@triton.jit
def in_half(column, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Which columns belong to half a head."""
    return column >= 0 if BLOCK_HALF == HALF else column < HALF


@triton.jit
def _weights(q_weights, k_weights, is_key, mask):
    return tl.where(is_key, tl.load(k_weights, mask=mask, other=0.0), tl.load(q_weights, mask=mask, other=0.0))


@triton.jit
def join_halves(first, second):
    """[BLOCK_HEADS, BLOCK_HALF] twice -> [2 * BLOCK_HALF, BLOCK_HEADS]."""
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
    first,  # the key, as turn_group gave it
    second,
    value_ptr,  # [2 * HALF]: the token's value
    k_ptr,  # where the key goes
    v_ptr,  # where the value goes
    k_per_scale,  # None if the cache has the token's format
    v_per_scale,
    kept,
    ROW: tl.constexpr,  # the key's
    HALF: tl.constexpr,
    LARGEST: tl.constexpr,  # of the cache's format
):
    """Store a token's key and value of one head if it is to be ``kept``; the program's own loads will find them."""
    row, column = tl.arange(0, first.shape[0])[:, None], tl.arange(0, first.shape[1])[None, :]
    inside = in_half(column, HALF, first.shape[1])
    v_first = tl.load(value_ptr + column, mask=kept & inside, other=0.0)
    v_second = tl.load(value_ptr + HALF + column, mask=kept & inside, other=0.0)
    keys = k_ptr + column + tl.zeros([first.shape[0], 1], tl.int32)
    store_halves(keys, first, second, k_per_scale, kept & (row == ROW) & inside, HALF, LARGEST)
    store_halves(v_ptr + column, v_first, v_second, v_per_scale, kept & inside, HALF, LARGEST)
    tl.debug_barrier()


@triton.jit
def cache_token_int8(
    first,  # the key, as turn_group gave it
    second,
    value_ptr,  # [2 * HALF]: the token's value
    k_ptr,  # where the key goes
    v_ptr,  # where the value goes
    scales_ptr,  # where the scales of both go
    kept,
    ROW: tl.constexpr,  # the key's
    HALF: tl.constexpr,
):
    """`cache_token` for a cache in int8."""
    row, one, column = tl.arange(0, first.shape[0]), tl.arange(0, 1), tl.arange(0, first.shape[1])[None, :]
    inside = in_half(column, HALF, first.shape[1])
    v_mask = kept & inside
    v_first = tl.load(value_ptr + column, mask=v_mask, other=0.0)
    v_second = tl.load(value_ptr + HALF + column, mask=v_mask, other=0.0)
    keys, is_key = k_ptr + column + tl.zeros([first.shape[0], 1], tl.int32), kept & (row == ROW)
    store_halves_int8(keys, scales_ptr + 0 * row, first, second, is_key[:, None] & inside, is_key, 0, HALF)
    store_halves_int8(v_ptr + column, scales_ptr + 1 + one, v_first, v_second, v_mask, kept & (one >= 0), -128, HALF)
    tl.debug_barrier()
