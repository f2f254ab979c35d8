"""Packs ggml's K-quants, each number rounded to the nearest. ggml's own program searches for better scales; its library
in Python can only read them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as Type

Array = np.ndarray
BLOCK = 256


def _halves(numbers: Array) -> tuple[Array, Array]:
    """float32 [B] as float16: their two bytes [B, 2], and what they mean."""
    short = numbers.astype(np.float16)
    return short.view(np.uint8).reshape(-1, 2), short.astype(np.float32)


def _safe(scale: Array) -> Array:
    return np.where(scale > 0, scale, 1.0)


def _with_minima(blocks: Array, most: int) -> tuple[Array, Array, Array]:
    """[B, 256] -> the first 16 bytes, codes [B, 8, 32] of 0 to ``most``."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0)
    scale = (np.maximum(groups.max(2), 0) - low) / most
    large, d = _halves(scale.max(1) / 63)
    least, dmin = _halves(-low.min(1) / 63)
    sc = (scale / _safe(d)[:, None]).round().clip(0, 63).astype(np.uint8)
    m = (-low / _safe(dmin)[:, None]).round().clip(0, 63).astype(np.uint8)
    steps, off = d[:, None] * sc, dmin[:, None] * m
    codes = ((groups + off[..., None]) / _safe(steps)[..., None]).round().clip(0, most).astype(np.uint8)
    return np.concatenate([large, least, _six_bits(sc, m)], 1), codes, groups


def _six_bits(sc: Array, m: Array) -> Array:
    """Eight scales and eight minima [B, 8] -> [B, 12]."""
    first, second = sc[:, :4] | (sc[:, 4:] >> 4) << 6, m[:, :4] | (m[:, 4:] >> 4) << 6
    return np.concatenate([first, second, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4], 1)


def _pairs(codes: Array) -> Array:
    """[B, 8, 32] -> [B, 128]: even groups in low halves, odd ones in high ones."""
    low = codes & 15
    return (low[:, ::2] | low[:, 1::2] << 4).reshape(len(codes), -1)


def _q4_k(blocks: Array) -> Array:
    head, codes, _ = _with_minima(blocks, 15)
    return np.concatenate([head, _pairs(codes)], 1)


def _q5_k(blocks: Array) -> Array:
    head, codes, _ = _with_minima(blocks, 31)
    fifth = ((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    return np.concatenate([head, fifth, _pairs(codes)], 1)


def _q6_k(blocks: Array) -> Array:
    groups = blocks.reshape(-1, 16, 16)
    scale = np.abs(groups).max(2) / 31
    large, d = _halves(scale.max(1) / 127)
    small = (scale / _safe(d)[:, None]).round().clip(0, 127).astype(np.int8)
    steps = _safe(d[:, None] * small)
    codes = ((groups / steps[..., None]).round().clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15) | (codes[:, :, 2:] & 15) << 4
    high = ((codes >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(2, dtype=np.uint8)
    parts = low.reshape(len(blocks), -1), high.reshape(len(blocks), -1), small.view(np.uint8), large
    return np.concatenate(parts, 1)


PACK: dict[Type, Callable[[Array], Array]] = {Type.Q4_K: _q4_k, Type.Q5_K: _q5_k, Type.Q6_K: _q6_k}


def quantize(values: Array, kind: Type) -> Array:
    """float32 [..., K] -> uint8 [..., bytes of a row]; 256 divides K."""
    blocks = PACK[kind](values.reshape(-1, BLOCK).astype(np.float32))
    return blocks.reshape(*values.shape[:-1], -1)
