"""From codes to their place in a layout."""

from __future__ import annotations

import torch

from pagebus.actors.executor.loading.formats.reading import Codes, FormatError
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.kernels.quantized.layouts import Layout, W4Words, W8Blocks, W8Rows
from pagebus.kernels.quantized.words import pack_words

PACKED_AT_ONCE = 1 << 22
"""Numbers that are packed at once, in 4 bytes each: few beside a module's own."""
LARGEST_SCALE = 1e30
"""Beyond it weights may become infinite; no model comes near."""
MIDDLE = 8
"""The code of 4 bits that means 0, for those that become bytes beside parts of other formats."""
NOT_A_NUMBER = 0x7F
"""Of float8_e4m3fn, without its sign."""


def store(target: Layout, codes: Codes, scheme: Scheme) -> None:
    """Fill ``target`` [n, K], a part of a layout. Raises FormatError for numbers that are none."""
    _check(codes)
    values = codes.values
    if codes.groups is not None:
        values = values[:, _in_order(target, codes.groups, scheme)]
    if isinstance(target, W8Rows):
        target.values.copy_(values)
        target.scale.copy_(codes.scale.expand(len(values), 1).squeeze(1))
    elif isinstance(target, W8Blocks):
        _store_blocks(target, values, codes, scheme)
    else:
        _store_words(target, values, codes)


def _check(codes: Codes) -> None:
    scale = codes.scale
    exponents = scale.dtype == torch.uint8
    wrong = bool((scale == 255).any()) if exponents else _absurd(scale)
    if wrong or (codes.whole is not None and _absurd(codes.whole)):
        raise FormatError(f"has scales that are no finite numbers, or above {LARGEST_SCALE:.0e}")
    floats = codes.values.dtype == torch.float8_e4m3fn
    if floats and _not_numbers(codes.values):
        raise FormatError("has weights that are no numbers")
    if codes.zero is not None and _absurd(codes.zero):
        raise FormatError("has zero points that are no finite numbers")
    if codes.low is not None and _absurd(codes.low):
        raise FormatError(f"has minima that are no finite numbers, or above {LARGEST_SCALE:.0e}")


def _not_numbers(values: torch.Tensor) -> bool:
    """Whether any of float8_e4m3fn [N, K] is a NaN; looks at some rows at a time."""
    parts = values.view(torch.uint8).split(max(1, PACKED_AT_ONCE // values.shape[1]))
    return any(bool(((part & NOT_A_NUMBER) == NOT_A_NUMBER).any()) for part in parts)


def _absurd(numbers: torch.Tensor) -> bool:
    return not bool((numbers.float().abs() <= LARGEST_SCALE).all())


def _in_order(target: Layout, groups: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The columns group by group, and the target told so. Parts of one product read the same inputs, so they must agree
    in this."""
    order = torch.argsort(groups, stable=True)
    width = scheme.block[1] or len(groups)
    plain = torch.arange(len(groups), device=groups.device) // width
    if not torch.equal(groups[order].long(), plain):
        raise FormatError(f"has groups (g_idx) that are not all of {width} columns")
    assert not isinstance(target, W8Rows)
    assert target.order is not None
    order32 = order.to(torch.int32)
    if bool((target.order >= 0).all()) and not torch.equal(target.order, order32):
        raise FormatError("has its columns in another order (g_idx) than another part of the same product")
    target.order.copy_(order32)
    return order


def _store_blocks(target: W8Blocks, values: torch.Tensor, codes: Codes, scheme: Scheme) -> None:
    middle = MIDDLE if values.dtype == torch.uint8 else 0
    target.values.copy_(values.view(torch.int8) - middle if middle else values)
    target.scale.copy_(_rows(codes.scale, target, scheme))
    if target.zero is not None:
        assert codes.zero is not None
        target.zero.copy_(_rows(codes.zero, target, scheme))
    if target.low is not None:
        target.low.copy_(codes.scale.new_zeros(1) if codes.low is None else _rows(codes.low, target, scheme))


def _rows(scale: torch.Tensor, target: W8Blocks, scheme: Scheme) -> torch.Tensor:
    """Numbers of the file's blocks, repeated for the layout's. Those are lower where parts of a product begin within a
    block, and narrower where another part has narrower ones."""
    height = scheme.block[0]
    if height > 1 and target.block[0] == 1:
        scale = scale.repeat_interleave(height, 0)[: len(target.values)]
    width = scheme.block[1] or target.shape[1]
    if scale.shape[-1] != 1 and width > target.block[1]:
        scale = scale.repeat_interleave(width // target.block[1], -1)
    return scale.expand(target.scale.shape)


def _store_words(target: W4Words, values: torch.Tensor, codes: Codes) -> None:
    rows = max(1, PACKED_AT_ONCE // values.shape[1])
    for start in range(0, len(values), rows):
        target.words[start : start + rows] = pack_words(values[start : start + rows])
    shape = target.scale.shape
    target.scale.copy_(codes.scale.t().expand(shape))
    if target.zero is not None:
        assert codes.zero is not None
        target.zero.copy_(codes.zero.t().expand(shape))
    if target.low is not None:
        assert codes.low is not None
        target.low.copy_(codes.low.t().expand(shape))
    if target.whole is not None:
        assert codes.whole is not None
        target.whole.copy_(codes.whole.expand(target.whole.shape))
    if codes.table is not None:
        assert target.table is not None
        target.table.copy_(codes.table)
