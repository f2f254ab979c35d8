"""Formats of 8 bits a number: FP8, INT8, MXFP8."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagebus.actors.executor.loading.formats.reading import (
    E4M3,
    E8M0,
    FLOATS,
    Codes,
    Expected,
    FormatError,
    Reader,
    Tensors,
    groups_of,
    unused,
)
from pagebus.actors.model.quantization.scheme import Scheme
from pagebus.kernels.quantized.values import exponents

STATIC = unused("input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "k_scale", "v_scale")


def _scale_shapes(scheme: Scheme, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    height, width = scheme.block
    if height > 1:
        return ((-(-rows // height), -(-columns // width)),)
    if width:
        return ((rows, groups_of(scheme, columns)),)
    return ((), (1,), (1, 1)) if not height else ((rows, 1), (rows,), (1,), ())


def _fp8_scales(scheme: Scheme) -> tuple[str, str]:
    """The scale's name, and another. Both multiply. transformers has the name of those of blocks for that of a whole
    tensor, too (Ministral 3)."""
    of_all, of_blocks = "weight_scale", "weight_scale_inv"
    return (of_blocks, of_all) if scheme.block[0] > 1 else (of_all, of_blocks)


def _fp8(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    name, also = _fp8_scales(scheme)
    scale = Expected((*FLOATS, "F8_E8M0"), _scale_shapes(scheme, rows, columns), also=also)
    return {"weight": Expected(E4M3, ((rows, columns),)), name: scale, **STATIC}


def _read_fp8(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    return Codes(tensors["weight"], _matrix(tensors[_fp8_scales(scheme)[0]].float()))


def _plain(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    shapes = _scale_shapes(scheme, rows, columns)
    formats = E4M3 if scheme.numbers == "e4m3" else ("I8",)
    zero = Expected(("I8", "I32", *FLOATS), shapes, needed=scheme.zeros, read=scheme.zeros)
    return {
        "weight": Expected(formats, ((rows, columns),)),
        "weight_scale": Expected(FLOATS, shapes),
        "weight_zero_point": zero,
        **STATIC,
        **unused("weight_shape"),
    }


def _read_plain(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    zero = _matrix(tensors["weight_zero_point"].float()) if scheme.zeros else None
    return Codes(tensors["weight"], _matrix(tensors["weight_scale"].float()), zero)


def _mxfp8(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    scale = Expected(E8M0, ((rows, groups_of(scheme, columns)),))
    return {"weight": Expected(E4M3, ((rows, columns),)), "weight_scale": scale, **STATIC}


def _read_mxfp8(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    return Codes(tensors["weight"], exponents(tensors["weight_scale"].view(torch.uint8)))


def _bnb_int8(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    return {
        "weight": Expected(("I8",), ((rows, columns),)),
        "SCB": Expected(FLOATS, ((rows,), (rows, 1))),
        **unused("weight_format"),
    }


def _read_bnb_int8(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """The largest of each row, which 127 stands for. Outliers of activations are not treated apart."""
    return Codes(tensors["weight"], tensors["SCB"].float().view(-1, 1) / 127)


def _torchao(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    formats = E4M3 if scheme.numbers == "e4m3" else ("I8",)
    shapes = (*_scale_shapes(scheme, rows, columns), (1, 1))
    return {
        "_weight_qdata": Expected(formats, ((rows, columns),)),
        "_weight_scale": Expected(FLOATS, shapes),
        "_weight_zero_point": Expected(("I8", *FLOATS), shapes, needed=scheme.zeros),
    }


def _read_torchao(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """Files have zero points even if the scheme has none; then all must be 0."""
    zero = tensors.get("_weight_zero_point")
    if zero is not None and not scheme.zeros and bool(zero.float().any()):
        raise FormatError("has zero points, which its configuration does not have")
    matrix = _matrix(zero.float()) if zero is not None and scheme.zeros else None
    return Codes(tensors["_weight_qdata"], _matrix(tensors["_weight_scale"].float()), matrix)


def _matrix(scale: torch.Tensor) -> torch.Tensor:
    """One number, or one of each row, as a matrix."""
    return scale if scale.dim() == 2 else scale.reshape(-1, 1)


READERS = {
    "fp8": Reader(_fp8, _read_fp8),
    "ct_plain": Reader(_plain, _read_plain),
    "ct_mxfp8": Reader(_mxfp8, _read_mxfp8),
    "bnb_int8": Reader(_bnb_int8, _read_bnb_int8),
    "torchao": Reader(_torchao, _read_torchao),
}
