"""Encodes vectors as bytes: float32, float16, bfloat16 or one of two 8-bit formats, in either byte order."""

from __future__ import annotations

import sys
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Order = Literal["native", "little", "big"]
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
ORDERS: tuple[Order, ...] = ("native", "little", "big")
_MANTISSA_BITS = {"fp8_e4m3": 3, "fp8_e5m2": 2}
_LARGEST = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}
"""Codes of the largest finite numbers."""


def to_bytes(vector: NDArray[np.float32], dtype: DType, order: Order) -> bytes:
    """The numbers [n] one after another, each rounded to the nearest, ties to even."""
    with np.errstate(over="ignore"):
        numbers = _as_numbers(vector, dtype)
    wanted = sys.byteorder if order == "native" else order
    return numbers.astype(numbers.dtype.newbyteorder("<" if wanted == "little" else ">"), copy=False).tobytes()


def _as_numbers(vector: NDArray[np.float32], dtype: DType) -> NDArray[np.generic]:
    """[n], of numpy's type for it or as unsigned integers with the same bits."""
    if dtype == "float32" or dtype == "float16":
        return vector.astype(dtype)
    if dtype == "bfloat16":
        bits = vector.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
        return np.where(np.isnan(vector), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return _as_8_bits(vector, dtype)


def _as_8_bits(vector: NDArray[np.float32], dtype: DType) -> NDArray[np.uint8]:
    values = _positive_values(dtype)
    magnitudes = np.abs(vector).astype(np.float64)
    above = np.searchsorted(values, magnitudes).clip(0, len(values) - 1)
    below = (above - 1).clip(0)
    middle = (values[below] + values[above]) / 2
    is_even = below % 2 == 0
    nearest = np.where((magnitudes < middle) | ((magnitudes == middle) & is_even), below, above).astype(np.uint8)
    if dtype == "fp8_e4m3":  # has no infinity: what is too large becomes the largest
        nearest = nearest.clip(max=_LARGEST[dtype])
    nearest = np.where(np.isnan(vector), np.uint8(0x7F), nearest)
    return (nearest | (np.signbit(vector).astype(np.uint8) << np.uint8(7))).astype(np.uint8)


@cache
def _positive_values(dtype: DType) -> NDArray[np.float64]:
    """What the codes from 0 on stand for, up to the first that is no number: where that begins, it stands as the number
    that would come next."""
    bits = _MANTISSA_BITS[dtype]
    codes = np.arange(_LARGEST[dtype] + 2)
    exponents, mantissas = codes >> bits, (codes & ((1 << bits) - 1)) / (1 << bits)
    bias = (1 << (6 - bits)) - 1
    return np.where(exponents == 0, mantissas * 2.0 ** (1 - bias), (1 + mantissas) * 2.0 ** (exponents - bias))
