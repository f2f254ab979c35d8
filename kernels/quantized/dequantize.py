"""Quantized weights as dense ones: rows of any layout into a scratch, for libraries' products of many tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pagebus.kernels.coded.products import rounded_product
from pagebus.kernels.coded.scales import load_scale
from pagebus.kernels.coded.unpack import widen, widen_words, word_offset
from pagebus.kernels.coded.weights import WORDS, Code, instructions_for
from pagebus.kernels.common.triton import tl, triton
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows, tensors_of

ROWS, COLUMNS = 16, 128
ROWS_OF_WORDS = 64


def dequantize_reference(layout: Layout, out: torch.Tensor, start: int) -> torch.Tensor:
    """Rows of a layout [N, K] from ``start`` on, as many as ``out`` [n, K] has, their columns in the stored order."""
    if not isinstance(layout, W8Rows):
        layout = replace(layout, order=None)
    return out.copy_(layout.dense(out.dtype)[start : start + len(out)])


@triton.jit
def _dequantize_kernel(
    numbers_ptr,  # [N, K], or words [N, ceil(K / 128) * 16]
    scale_ptr,
    zero_ptr,  # or None, as the following
    low_ptr,
    whole_ptr,  # [N]
    table_ptr,  # [16]
    out_ptr,  # [n, K]
    first_row,
    num_rows,  # n
    size,  # K
    stride_scale,
    stride_group,
    CODE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # 128
):
    place, within = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    column = tl.program_id(1) * COLUMNS + within
    inside = (place < num_rows)[:, None] & (column < size)[None, :]
    row = (first_row + tl.where(place < num_rows, place, 0)).to(tl.int64)
    if CODE == WORDS:
        word = tl.program_id(1) * 16 + within % 16
        words = tl.load(numbers_ptr + row[:, None] * (tl.cdiv(size, 128) * 16) + word[None, :])
        code = (words >> (within // 16 * 4)[None, :]) & 15
        number = tl.load(table_ptr + code) if table_ptr is not None else code.to(tl.float32)
    else:
        number = widen(tl.load(numbers_ptr + row[:, None] * size + column[None, :], mask=inside, other=0), tl.float32,
                       CODE, NATIVE)  # fmt: skip
    places = (row // HEIGHT * stride_scale)[:, None] + (column // WIDTH * stride_group)[None, :]
    if zero_ptr is not None:
        number -= tl.load(zero_ptr + places, mask=inside, other=0).to(tl.float32)
    elif CODE == WORDS and table_ptr is None:
        number -= 8.0
    scale = load_scale(scale_ptr, tl.where(inside, places, 0))
    if whole_ptr is not None:
        scale *= tl.load(whole_ptr + row)[:, None]
    number = rounded_product(number, scale, NATIVE)
    if low_ptr is not None:
        number -= tl.load(low_ptr + places, mask=inside, other=0.0)
    target = out_ptr + place.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(target, number.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_words_kernel(
    words_ptr,  # [N, ceil(K / 128) * 16]
    scale_ptr,
    zero_ptr,  # or None
    whole_ptr,  # [N], or None
    out_ptr,  # [n, K], 16 bits
    first_row,
    num_rows,  # n
    size,  # K
    stride_group,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    tile = tl.program_id(0)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = place < num_rows
    row = (first_row + tl.where(inside, place, 0)).to(tl.int64)
    words = tl.load(words_ptr + row[:, None] * (tl.cdiv(size, 128) * 16) + (tile * 16 + tl.arange(0, 16))[None, :])
    last = (size - 1) // WIDTH  # what is behind the last column is not stored
    if WIDTH % 128 == 0:
        zeros = 8.0 if zero_ptr is None else tl.load(zero_ptr + row + tile * 128 // WIDTH * stride_group)
    else:
        zeros = 0.0  # taken off in float32, each its own
    whole = 1.0 if whole_ptr is None else tl.load(whole_ptr + row)
    offset = tl.broadcast_to(word_offset(zeros, TYPE), (ROWS,))
    codes = widen_words(words, offset[:, None], TYPE, NATIVE)
    numbers: tl.tuple = ()
    for index in tl.static_range(8):
        group = tl.minimum((tile * 128 + index * 16) // WIDTH, last) * stride_group
        number = codes[index].to(tl.float32)
        if WIDTH % 128 != 0:
            number -= 8.0 if zero_ptr is None else tl.load(zero_ptr + row + group).to(tl.float32)[:, None]
        scale = load_scale(scale_ptr, row + group) * whole
        numbers += ((number * scale[:, None]).to(TYPE),)
    even = tl.join(tl.join(numbers[0], numbers[4]), tl.join(numbers[2], numbers[6]))
    odd = tl.join(tl.join(numbers[1], numbers[5]), tl.join(numbers[3], numbers[7]))
    result = tl.join(even, odd).permute(0, 2, 3, 4, 1).reshape(ROWS, 128)
    column = tile * 128 + tl.arange(0, 128)
    target = out_ptr + place.to(tl.int64)[:, None] * size + column[None, :]
    tl.store(target, result, mask=inside[:, None] & (column < size)[None, :])


def reads_whole_words(layout: Layout, dtype: torch.dtype) -> bool:
    """Whether each word is read once for its eight numbers: of integers, whose groups do not cut a word's columns."""
    if not isinstance(layout, W4Words) or dtype.itemsize != 2:
        return False
    return layout.table is None and layout.low is None and layout.group % 16 == 0


def dequantize(layout: Layout, out: torch.Tensor, start: int) -> torch.Tensor:
    """Rows of a layout [N, K] from ``start`` on, as many as ``out`` [n, K] has, their columns in the stored order."""
    rows, columns = out.shape
    assert out.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in tensors_of(layout))
    assert start + rows <= layout.shape[-2]
    assert columns == layout.shape[-1]
    if isinstance(layout, W4Words) and reads_whole_words(layout, out.dtype):
        given = _arguments(layout)
        _dequantize_words_kernel[(-(-columns // COLUMNS), -(-rows // ROWS_OF_WORDS))](
            given["numbers_ptr"], given["scale_ptr"], given["zero_ptr"], given["whole_ptr"], out, start, rows, columns,
            layout.shape[-2], WIDTH=layout.group, NATIVE=instructions_for(out.device), ROWS=ROWS_OF_WORDS, num_warps=4,
        )  # fmt: skip
        return out
    return dequantize_numbers(layout, out, start)


def dequantize_numbers(layout: Layout, out: torch.Tensor, start: int) -> torch.Tensor:
    """`dequantize` number by number: of any layout."""
    rows, columns = out.shape
    _dequantize_kernel[(-(-rows // ROWS), -(-columns // COLUMNS))](
        **_arguments(layout), out_ptr=out, first_row=start, num_rows=rows, size=columns,
        NATIVE=instructions_for(out.device), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out


def _arguments(layout: Layout) -> dict[str, Any]:
    """Those of the kernel that say what the numbers mean."""
    columns = layout.shape[-1]
    none: dict[str, Any] = {"zero_ptr": None, "low_ptr": None, "whole_ptr": None, "table_ptr": None}
    if isinstance(layout, W4Words):
        e4m3 = layout.scale.dtype == torch.float8_e4m3fn
        return {
            "numbers_ptr": layout.words, "scale_ptr": layout.scale.view(torch.int8) if e4m3 else layout.scale,
            "zero_ptr": layout.zero, "low_ptr": layout.low, "whole_ptr": layout.whole, "table_ptr": layout.table,
            "stride_scale": 1, "stride_group": layout.shape[-2], "CODE": int(Code.WORDS), "HEIGHT": 1,
            "WIDTH": layout.group,
        }  # fmt: skip
    int8 = layout.values.dtype == torch.int8
    numbers = none | {
        "numbers_ptr": layout.values if int8 else layout.values.view(torch.uint8), "scale_ptr": layout.scale,
        "CODE": int(Code.INT8 if int8 else Code.E4M3),
    }  # fmt: skip
    if isinstance(layout, W8Blocks):
        height, width = layout.block
        return numbers | {
            "zero_ptr": layout.zero, "low_ptr": layout.low, "stride_scale": layout.scale.shape[-1], "stride_group": 1,
            "HEIGHT": height, "WIDTH": width,
        }  # fmt: skip
    return numbers | {"stride_scale": 1, "stride_group": 0, "HEIGHT": 1, "WIDTH": columns}
