"""Launches of products with quantized weights, on tensors of no memory, compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagebus.kernels.quantized.choice import LEAST_OF_E4M3
from pagebus.kernels.quantized.dequantize import dequantize
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows
from pagebus.kernels.quantized.products import gated_linear, linear_invariant, partial_linear
from pagebus.kernels.quantized.rounding import round_tokens, scale_sums

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rows(dtype: torch.dtype, rows: int, columns: int) -> W8Rows:
    return W8Rows(_meta(rows, columns, dtype=dtype), _meta(rows))


def _blocks(dtype: torch.dtype, block: tuple[int, int], zeros: bool, rows: int, columns: int) -> W8Blocks:
    shape = rows // block[0], columns // block[1]
    return W8Blocks(_meta(rows, columns, dtype=dtype), _meta(*shape), block, _meta(*shape) if zeros else None)


def _words(group: int, zeros: bool, rows: int, columns: int) -> W4Words:
    shape = columns // (group or columns), rows
    zero = _meta(*shape, dtype=torch.uint8) if zeros else None
    return W4Words(_meta(rows, columns // 8, dtype=torch.int32), _meta(*shape), columns, group or columns, zero)


KINDS: dict[str, Callable[[int, int], Layout]] = {
    "fp8": partial(_rows, E4M3),
    "fp8 128x128": partial(_blocks, E4M3, (128, 128), False),
    "int4 128 zeros": partial(_words, 128, True),
    "int4 32": partial(_words, 32, False),
    "int8": partial(_rows, INT8),
    "int4 128": partial(_words, 128, False),
    "int8 128 zeros": partial(_blocks, INT8, (1, 128), True),
    "int4": partial(_words, 0, False),
}
FEW = ("fp8", "int4 128 zeros", "int4 32")
TOKENS = (1, 8, 32, 64, 256)


def quantized(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each case and its launch: what is chosen for numbers of tokens, and with ``--deterministic``. All kinds for
    Hopper, some for others."""
    kinds = tuple(KINDS) if arch == 90 else FEW
    for name in kinds:
        for number, tokens in enumerate(TOKENS):
            product = (partial_linear, gated_linear)[number % 2]
            yield f"quantized {name}, {tokens} tokens", partial(_launch, product, KINDS[name], tokens)
        yield f"quantized {name}, 256 tokens, invariant", partial(_launch, linear_invariant, KINDS[name], 256)
        yield f"quantized {name}, dequantized", partial(_dequantize, KINDS[name])
    for dtype in (E4M3, INT8) if arch >= LEAST_OF_E4M3 else (INT8,):
        yield f"rounded to {dtype}", partial(round_tokens, _meta(300, 4096, dtype=torch.bfloat16), dtype)
    sums, scale, out = _meta(300, 4096, dtype=torch.int32), _meta(4096), _meta(300, 4096, dtype=torch.bfloat16)
    yield "whole sums", partial(scale_sums, sums, _meta(300, 1), scale, None, out)


def _launch(product: Callable[..., object], make: Callable[[int, int], Layout], tokens: int) -> None:
    product(_meta(tokens, 4096, dtype=torch.bfloat16), make(8192, 4096))


def _dequantize(make: Callable[[int, int], Layout]) -> None:
    dequantize(make(8192, 4096), _meta(1024, 4096, dtype=torch.bfloat16), 512)
