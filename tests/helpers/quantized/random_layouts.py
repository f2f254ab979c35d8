"""Layouts of random numbers, one of each sort that checkpoints become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch

from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows
from pagebus.kernels.quantized.values import E2M1
from pagebus.kernels.quantized.words import pack_words


def _bytes(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """All numbers of the format, but those that are none."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    bits = torch.randint(0, 127, (rows, columns), dtype=torch.uint8, device=device)
    bits |= torch.randint(0, 2, (rows, columns), dtype=torch.uint8, device=device) << 7
    return bits.view(torch.float8_e4m3fn)


def _scale(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.rand(shape, device=device) * 0.01 + 0.001


def w8_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> W8Rows:
    """A scale of each row."""
    return W8Rows(_bytes(rows, columns, dtype, device), _scale(rows, device=device))


def w8_blocks(
    rows: int, columns: int, dtype: torch.dtype, block: tuple[int, int], device: torch.device, *, zeros: bool = False
) -> W8Blocks:
    """Scales of blocks, and perhaps zeros."""
    shape = -(-rows // block[0]), -(-columns // block[1])
    zero = torch.randint(-128, 128, shape, device=device).float() if zeros else None
    return W8Blocks(_bytes(rows, columns, dtype, device), _scale(*shape, device=device), block, zero)


def w4_words(
    rows: int, columns: int, group: int, device: torch.device, *, zeros: bool = False, exponents: bool = False
) -> W4Words:
    """Scales of groups, and perhaps zeros; ``exponents``: powers of two."""
    words = pack_words(torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device))
    shape = -(-columns // group), rows
    scale = _scale(*shape, device=device) * 10
    if exponents:
        scale = torch.randint(120, 124, shape, dtype=torch.uint8, device=device)
    zero = torch.randint(0, 16, shape, dtype=torch.uint8, device=device) if zeros else None
    return W4Words(words, scale, columns, group, zero)


def _nvfp4(rows: int, columns: int, device: torch.device) -> W4Words:
    plain, e2m1 = w4_words(rows, columns, 16, device), torch.tensor(E2M1, device=device)
    scale, whole = (plain.scale * 100).to(torch.float8_e4m3fn), _scale(rows, device=device)
    return W4Words(plain.words, scale, columns, 16, whole=whole, table=e2m1, e2m1=True)


def _mxfp4(rows: int, columns: int, device: torch.device) -> W4Words:
    plain, e2m1 = w4_words(rows, columns, 32, device, exponents=True), torch.tensor(E2M1, device=device)
    return W4Words(plain.words, plain.scale, columns, 32, table=e2m1, e2m1=True)


def _with_lows(rows: int, columns: int, device: torch.device) -> W4Words:
    """Around zero: of weights with a sign in common all gates of a token may be shut, and their products are noise."""
    plain = w4_words(rows, columns, 32, device)
    zero = torch.zeros_like(plain.scale, dtype=torch.uint8)
    return W4Words(plain.words, plain.scale, columns, 32, zero, 7.5 * plain.scale)


def ordered(layout: W8Blocks | W4Words) -> Layout:
    """With its columns in an order of their own."""
    order = torch.randperm(layout.shape[-1], device=layout.scale.device).to(torch.int32)
    return replace(layout, order=order)


def _nf4(rows: int, columns: int, device: torch.device) -> W4Words:
    """A table that is no format's."""
    plain = w4_words(rows, columns, 64, device)
    return W4Words(plain.words, plain.scale, columns, 64, table=torch.linspace(-1, 1, 16, device=device) ** 3)


def _narrow(rows: int, columns: int, device: torch.device) -> W8Blocks:
    """Groups of 16, each with something to subtract or to add."""
    plain = w8_blocks(rows, columns, INT8, (1, 16), device)
    return W8Blocks(plain.values, plain.scale, (1, 16), low=torch.rand_like(plain.scale) - 0.5)


def stacked(
    make: Callable[[int, int, torch.device], Layout], experts: int, rows: int, columns: int, device: torch.device
) -> Layout:
    """Such layouts of a layer's experts."""
    each = [make(rows, columns, device) for _ in range(experts)]
    parts = {
        field.name: torch.stack([getattr(one, field.name) for one in each])
        for field in fields(each[0])
        if isinstance(getattr(each[0], field.name), torch.Tensor) and field.name != "table"
    }
    return replace(each[0], **parts)


E4M3, INT8 = torch.float8_e4m3fn, torch.int8
TILES_ONLY: dict[str, Callable[[int, int, torch.device], Layout]] = {
    "int4 groups of 96": lambda n, k, device: w4_words(n, k, 96, device, zeros=True),
    "int4 groups of 32, lows": _with_lows,
    "int8 groups of 16, lows": _narrow,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "nf4": _nf4,
}
"""Those that only kernels on tensor cores read."""
LAYOUTS: dict[str, Callable[[int, int, torch.device], Layout]] = {
    "fp8 rows": lambda n, k, device: w8_rows(n, k, E4M3, device),
    "int8 rows": lambda n, k, device: w8_rows(n, k, INT8, device),
    "fp8 blocks of 128x128": lambda n, k, device: w8_blocks(n, k, E4M3, (128, 128), device),
    "fp8 groups of 32": lambda n, k, device: w8_blocks(n, k, E4M3, (1, 32), device),
    "int8 groups of 128, zeros": lambda n, k, device: w8_blocks(n, k, INT8, (1, 128), device, zeros=True),
    "int8 rows, zeros": lambda n, k, device: w8_blocks(n, k, INT8, (1, k), device, zeros=True),
    "int8 groups of 128, ordered": lambda n, k, device: ordered(w8_blocks(n, k, INT8, (1, 128), device)),
    "int4 rows": lambda n, k, device: w4_words(n, k, k, device),
    "int4 groups of 128": lambda n, k, device: w4_words(n, k, 128, device),
    "int4 groups of 128, zeros": lambda n, k, device: w4_words(n, k, 128, device, zeros=True),
    "int4 groups of 128, ordered": lambda n, k, device: ordered(w4_words(n, k, 128, device, zeros=True)),
    "int4 groups of 256": lambda n, k, device: w4_words(n, k, 256, device),
    "int4 groups of 64, zeros": lambda n, k, device: w4_words(n, k, 64, device, zeros=True),
    "int4 groups of 32": lambda n, k, device: w4_words(n, k, 32, device),
    "int4 groups of 32, exponents": lambda n, k, device: w4_words(n, k, 32, device, exponents=True),
} | TILES_ONLY
"""Those that kernels read directly."""
OTHERS: dict[str, Callable[[int, int, torch.device], Layout]] = {
    "int4 groups of 24": lambda n, k, device: w4_words(n, k, 24, device),
}
"""Those that are dequantized first."""
