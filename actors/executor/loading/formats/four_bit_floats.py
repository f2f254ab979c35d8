"""Floats and tables of 4 bits: MXFP4, NVFP4, and bitsandbytes' nf4 and fp4."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch

from pagebus.actors.executor.loading.formats.eight_bits import STATIC
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
    nibbles,
    unused,
)
from pagebus.actors.model.quantization.scheme import Scheme

BYTES = ("U8",)


def _mxfp4(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    """As gpt-oss has them: bytes of each group in a dimension of their own."""
    groups = groups_of(scheme, columns)
    return {
        "blocks": Expected(BYTES, ((rows, groups, 16), (rows, 16 * groups))),
        "scales": Expected(E8M0, ((rows, groups),)),
    }


def _read_mxfp4(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    return Codes(nibbles(tensors["blocks"].flatten(1))[:, :columns], tensors["scales"].view(torch.uint8))


def _ct_mxfp4(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    return {
        "weight_packed": Expected(BYTES, ((rows, columns // 2),)),
        "weight_scale": Expected(E8M0, ((rows, groups_of(scheme, columns)),)),
        **unused("weight_shape"),
        **STATIC,
    }


def _read_ct_mxfp4(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    return Codes(nibbles(tensors["weight_packed"]), tensors["weight_scale"].view(torch.uint8))


def _ct_nvfp4(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    return _nvfp4_tensors("weight_packed", "weight_global_scale", scheme, rows, columns)


def _modelopt_nvfp4(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    return _nvfp4_tensors("weight", "weight_scale_2", scheme, rows, columns)


def _nvfp4_tensors(packed: str, whole: str, scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    return {
        packed: Expected(BYTES, ((rows, columns // 2),)),
        "weight_scale": Expected(E4M3, ((rows, groups_of(scheme, columns)),)),
        whole: Expected(FLOATS, ((), (1,), (1, 1))),
        **unused("input_global_scale", "weight_shape"),
        **STATIC,
    }


def _read_ct_nvfp4(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """compressed-tensors divides by its number for the whole tensor ..."""
    whole = tensors["weight_global_scale"].float().reshape(())
    return Codes(nibbles(tensors["weight_packed"]), tensors["weight_scale"], whole=1.0 / whole)


def _read_modelopt_nvfp4(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """... and ModelOpt multiplies."""
    whole = tensors["weight_scale_2"].float().reshape(())
    return Codes(nibbles(tensors["weight"]), tensors["weight_scale"], whole=whole)


def _bnb_4bit(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    count = rows * columns
    size = -(-count // 2)
    state = Expected(BYTES)
    return {
        "weight": Expected(BYTES, ((size, 1), (1, size), (size,))),
        "weight.absmax": Expected((*FLOATS, "U8"), ((-(-count // scheme.block[1]),),)),
        "weight.quant_map": Expected(FLOATS, ((16,),)),
        "weight.nested_absmax": Expected(FLOATS, needed=False),
        "weight.nested_quant_map": Expected(FLOATS, ((256,),), needed=False),
        f"weight.quant_state.bitsandbytes__{scheme.numbers}": state,
    }


def _read_bnb_4bit(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """Blocks run over the flat matrix, so they are groups of columns only if rows are a whole number of blocks."""
    state = _bnb_state(tensors[f"weight.quant_state.bitsandbytes__{scheme.numbers}"])
    block = scheme.block[1]
    if state.get("blocksize") != block or columns % block:
        raise FormatError(f"has blocks of {state.get('blocksize')} numbers and rows of {columns}: only blocks of "
                          f"{block} that end with the rows are read")  # fmt: skip
    absmax = tensors["weight.absmax"]
    if absmax.dtype == torch.uint8:
        absmax = _nested(tensors, absmax, state)
    codes = nibbles(tensors["weight"].flatten(), high_first=True)[: rows * columns]
    table = tensors["weight.quant_map"].float()
    return Codes(codes.view(rows, columns), absmax.float().view(rows, -1), table=table)


def _nested(tensors: Tensors, absmax: torch.Tensor, state: Mapping[str, object]) -> torch.Tensor:
    """Scales that are quantized themselves: entries of a table, times a scale of each 256, plus an offset."""
    size, offset = state.get("nested_blocksize", 256), state.get("nested_offset", 0.0)
    if "weight.nested_absmax" not in tensors or "weight.nested_quant_map" not in tensors:
        raise FormatError("has scales of one byte, but no weight.nested_absmax and weight.nested_quant_map")
    if type(size) is not int or size < 1 or not isinstance(offset, float) or not math.isfinite(offset):
        raise FormatError("has a quant_state without nested_blocksize or nested_offset")
    spread = tensors["weight.nested_absmax"].float().repeat_interleave(size)[: len(absmax)]
    if len(spread) < len(absmax):
        raise FormatError("has too few numbers in weight.nested_absmax")
    return tensors["weight.nested_quant_map"].float()[absmax.long()] * spread + offset


def _bnb_state(data: torch.Tensor) -> Mapping[str, object]:
    try:
        state = json.loads(bytes(data.flatten().tolist()))
    except ValueError as error:
        raise FormatError("has a quant_state that is no JSON") from error
    if not isinstance(state, dict):
        raise FormatError("has a quant_state that is no JSON object")
    return state


READERS = {
    "mxfp4": Reader(_mxfp4, _read_mxfp4),
    "ct_mxfp4": Reader(_ct_mxfp4, _read_ct_mxfp4),
    "ct_nvfp4": Reader(_ct_nvfp4, _read_ct_nvfp4),
    "modelopt_nvfp4": Reader(_modelopt_nvfp4, _read_modelopt_nvfp4),
    "bnb_4bit": Reader(_bnb_4bit, _read_bnb_4bit),
}
