"""Codes of 4 bits that are floats, or places in a table, as numbers of 16 bits.

The floats E2M1 are moved to where exponent and mantissa are, as those of 8 bits are: they are exact. Entries of other
tables (nf4) are read by each thread, from a cache line that stays near, and rounded to 16 bits.
"""

from __future__ import annotations

from pagebus.kernels.coded.unpack import eight_of
from pagebus.kernels.coded.weights import E2M1
from pagebus.kernels.common.triton import constant, tl, triton


def _floats_code(magnitude: int, bits: str, multiply: str) -> str:
    """Eight registers of two numbers each, from two words: the codes at the same place of both words come together, and
    their magnitude is moved by ``magnitude`` places, the sign by three more."""
    lines = [".reg .b32 half, number, sign, factor, zero;", "mov.b32 zero, 0x80008000;"]
    for half, order in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 half, $8, $9, {order};")
        for place in range(4):
            lines.append(_shift("number", magnitude - 4 * place))
            lines.append(f"and.b32 number, number, {bits};")
            lines.append(_shift("sign", 12 - 4 * place))
            lines.append("lop3.b32 number, sign, 0x80008000, number, 0xea;")
            lines.append(multiply.format(4 * half + place))
    return "{\n" + "\n".join(lines) + "\n}"


def _shift(register: str, left: int) -> str:
    return f"shl.b32 {register}, half, {left};" if left >= 0 else f"shr.b32 {register}, half, {-left};"


_BFLOAT16 = constant(
    _floats_code(6, "0x01c001c0", "mov.b32 factor, 0x7e807e80; fma.rn.bf16x2 ${}, number, factor, zero;")
)
_FLOAT16 = constant(_floats_code(9, "0x0e000e00", "mov.b32 factor, 0x74007400; mul.f16x2 ${}, number, factor;"))
"""The exponents' difference is a factor: 2^126, or 2^14."""


@triton.jit
def widen_values(words, table_ptr, TYPE: tl.constexpr, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """Words [N, 16] of a tile of 128 columns as eight [N, 16] of 16 columns each, in ``TYPE``."""
    if CODE == E2M1 and NATIVE:
        ASSEMBLY: tl.constexpr = _BFLOAT16 if tl.bfloat16 == TYPE else _FLOAT16
        found = eight_of(words, ASSEMBLY, TYPE)
    else:
        found = (
            _value_at(words, 0, table_ptr, TYPE, CODE), _value_at(words, 4, table_ptr, TYPE, CODE),
            _value_at(words, 8, table_ptr, TYPE, CODE), _value_at(words, 12, table_ptr, TYPE, CODE),
            _value_at(words, 16, table_ptr, TYPE, CODE), _value_at(words, 20, table_ptr, TYPE, CODE),
            _value_at(words, 24, table_ptr, TYPE, CODE), _value_at(words, 28, table_ptr, TYPE, CODE),
        )  # fmt: skip
    return found


@triton.jit
def _value_at(words, SHIFT: tl.constexpr, table_ptr, TYPE: tl.constexpr, CODE: tl.constexpr):
    code = (words >> SHIFT) & 15
    if CODE == E2M1:
        bits = ((code & 8) << 12) | ((code & 7) << 9)
        number = bits.to(tl.int16).to(tl.float16, bitcast=True) * 16384.0
    else:
        number = tl.load(table_ptr + code)
    return number.to(TYPE)
