"""Whole numbers of a few bits in words of 32: GPTQ, AWQ, and compressed-tensors' pack-quantized."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagebus.actors.executor.loading.formats.eight_bits import STATIC
from pagebus.actors.executor.loading.formats.reading import (
    BIAS,
    FLOATS,
    Codes,
    Expected,
    FormatError,
    Reader,
    Tensors,
    groups_of,
    nibbles,
    unpack_bits,
    unused,
)
from pagebus.actors.model.quantization.scheme import Scheme

INTEGERS = ("I32",)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word in which its first, second, ... column is: columns lie as 0, 2, 4, 6, 1, 3, 5, 7."""


def centred(codes: torch.Tensor, zero: torch.Tensor | None, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unsigned codes and zeros of ``bits`` as the layouts have them: up to 4 bits codes whose middle is 8, above that
    signed ones. ``zero`` None stays none: the middle."""
    middle = 2 ** (bits - 1)
    if bits > 4:
        values = (codes.to(torch.int16) - middle).to(torch.int8)
        return values, None if zero is None else zero.float() - middle
    return (codes if zero is not None else codes + (8 - middle)), zero


def _gptq(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    """AutoGPTQ gave every module a bias, of zeros where the model has none (Qwen2.5-7B-Instruct-GPTQ-Int4)."""
    groups, bits = groups_of(scheme, columns), scheme.bits
    return {
        "qweight": Expected(INTEGERS, ((-(-columns * bits // 32), rows),)),
        "qzeros": Expected(INTEGERS, ((groups, -(-rows * bits // 32)),), needed=scheme.zeros),
        "scales": Expected(FLOATS, ((groups, rows),)),
        "g_idx": Expected(INTEGERS, ((columns,),), needed=scheme.ordered),
        BIAS: Expected(FLOATS, ((rows,),), needed=False),
    }


def _read_gptq(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    if BIAS in tensors and bool(tensors[BIAS].any()):
        raise FormatError("has a bias that is not 0, and config.json asks for none")
    codes = unpack_bits(tensors["qweight"].t(), scheme.bits, columns)
    zero = _gptq_zeros(tensors.get("qzeros"), scheme, rows)
    values, zero = centred(codes, None if zero is None else zero.t(), scheme.bits)
    groups = _order(tensors.get("g_idx"), scheme, columns, "g_idx", "desc_act")
    return Codes(values, tensors["scales"].float().t(), zero, groups=groups)


def _gptq_zeros(words: torch.Tensor | None, scheme: Scheme, rows: int) -> torch.Tensor | None:
    """Version 1 stores one less than the zero. Ones were subtracted from all fields of a word at once, so that a zero
    of 0 borrows from its neighbour: adding them to the word gives both back. Fields of 3 bits wrap one by one.

    A symmetric file has the middle in every place; whether it is stored as version 1 or 2 does, it does not always say
    truly, so both are taken.
    """
    if not scheme.zeros:
        middle, stored = 2 ** (scheme.bits - 1), None if words is None else unpack_bits(words, scheme.bits, rows)
        if stored is not None and not any(bool((stored == each).all()) for each in (middle, middle - 1)):
            raise FormatError("is symmetric by the configuration, but qzeros are not all the middle")
        return None
    assert words is not None
    if scheme.packing == "gptq_v2":
        return unpack_bits(words, scheme.bits, rows)
    if scheme.bits == 3:
        return (unpack_bits(words, 3, rows) + 1) & 7
    ones = sum(1 << place for place in range(0, 32, scheme.bits))
    return unpack_bits(words.to(torch.int64) + ones, scheme.bits, rows)


def _order(
    groups: torch.Tensor | None, scheme: Scheme, columns: int, name: str, field: str
) -> torch.Tensor | None:  # fmt: skip
    """The group of each column by the tensor ``name``; None: in order. Raises FormatError if the configuration's
    ``field`` says so, and the tensor does not."""
    if groups is None:
        return None
    if not scheme.block[1]:
        groups = torch.zeros_like(groups)
    if scheme.ordered:
        return groups
    plain = torch.arange(columns, device=groups.device) // (scheme.block[1] or columns)
    if not torch.equal(groups, plain.to(groups.dtype)):
        raise FormatError(f"has columns in an order of their own ({name}), but the configuration has no {field}")
    return None


def _awq(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    groups = groups_of(scheme, columns)
    return {
        "qweight": Expected(INTEGERS, ((columns, -(-rows // 8)),)),
        "qzeros": Expected(INTEGERS, ((groups, -(-rows // 8)),), needed=scheme.zeros),
        "scales": Expected(FLOATS, ((groups, rows),)),
    }


def awq_codes(words: torch.Tensor, rows: int) -> torch.Tensor:
    """int32 [A, N / 8] -> uint8 [A, N]."""
    codes: torch.Tensor = unpack_bits(words, 4, 8 * words.shape[-1]).unflatten(-1, (-1, 8))
    return codes[..., list(AWQ_ORDER)].flatten(-2)[..., :rows]


def _read_awq(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """Zeros are as stored, nothing is added."""
    zero = awq_codes(tensors["qzeros"], rows).t() if scheme.zeros else None
    values, zero = centred(awq_codes(tensors["qweight"], rows).t(), zero, 4)
    return Codes(values, tensors["scales"].float().t(), zero)


def _ct_packed(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    groups, bits = groups_of(scheme, columns), scheme.bits
    widths = _words(columns, bits)
    shapes: tuple[tuple[int, ...], ...] = ((rows, groups), *(((rows,), (1,), ()) if groups == 1 else ()))
    shapes += () if scheme.block[0] else ((1, 1),)
    return {
        "weight_packed": Expected(INTEGERS, tuple((rows, width) for width in widths)),
        "weight_scale": Expected(FLOATS, shapes),
        "weight_zero_point": Expected(
            INTEGERS, tuple((width, groups) for width in _words(rows, bits)), needed=scheme.zeros, read=scheme.zeros
        ),
        "weight_g_idx": Expected(INTEGERS, ((columns,),), needed=scheme.ordered),
        **unused("weight_shape"),
        **STATIC,
    }


def _words(count: int, bits: int) -> tuple[int, ...]:
    """How many words this many numbers take: without gaps, or as in older files, with whole numbers in each word."""
    return tuple(dict.fromkeys((-(-count * bits // 32), -(-count // (32 // bits)))))


def ct_codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [A, words] -> uint8 [A, count] in either way."""
    if words.shape[-1] == -(-count * bits // 32):
        return unpack_bits(words, bits, count)
    shifts = torch.arange(32 // bits, device=words.device) * bits
    codes: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return codes.to(torch.uint8).flatten(-2)[..., :count]


def _read_ct_packed(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """Numbers are stored from 0 on, their zero points too, and these along the rows."""
    codes, zero = ct_codes(tensors["weight_packed"], scheme.bits, columns), None
    if scheme.zeros:
        zero = ct_codes(tensors["weight_zero_point"].t(), scheme.bits, rows).t()
    values, zero = centred(codes, zero, scheme.bits)
    scale = tensors["weight_scale"].float()
    groups = _order(tensors.get("weight_g_idx"), scheme, columns, "weight_g_idx", "actorder")
    return Codes(values, scale if scale.dim() == 2 else scale.reshape(-1, 1), zero, groups=groups)


def _torchao_int4(scheme: Scheme, rows: int, columns: int) -> Mapping[str, Expected]:
    groups = groups_of(scheme, columns)
    return {
        "_weight_qdata": Expected(("I8", "U8"), ((rows, columns // 2),)),
        "_weight_scale": Expected(FLOATS, ((groups, rows),)),
        "_weight_zero_point": Expected(FLOATS, ((groups, rows),)),
    }


def _read_torchao_int4(tensors: Tensors, scheme: Scheme, rows: int, columns: int) -> Codes:
    """Signed numbers, the first of a byte in its low half. The zero point is added after the scale has multiplied."""
    codes = nibbles(tensors["_weight_qdata"].view(torch.uint8)) ^ 8
    return Codes(codes, tensors["_weight_scale"].float().t(), low=-tensors["_weight_zero_point"].float().t())


READERS = {
    "torchao_int4": Reader(_torchao_int4, _read_torchao_int4),
    "gptq": Reader(_gptq, _read_gptq),
    "gptq_v2": Reader(_gptq, _read_gptq),
    "awq": Reader(_awq, _read_awq),
    "ct_packed": Reader(_ct_packed, _read_ct_packed),
}
