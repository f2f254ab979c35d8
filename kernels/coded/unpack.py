"""Numbers of 8 and 4 bits as numbers of 16 bits, in which they are exact.

Triton's own conversions take 4 to 9 instructions for a number, more than multiprocessors have time for while weights
come from memory. Inline assembly does two numbers of a register at once and takes 1.5 to 2.5.
"""

from __future__ import annotations

from pagebus.kernels.coded.weights import INT8
from pagebus.kernels.common.int8 import unpack
from pagebus.kernels.common.triton import constant, tl, triton

_INT8_BFLOAT16 = constant("""{
    .reg .b32 lower, upper, number, bias, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 lower, $2, 0, 0x4140;
    prmt.b32 upper, $2, 0, 0x4342;
    lop3.b32 number, lower, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 bias, lower, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, bias, minus, number;
    lop3.b32 number, upper, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 bias, upper, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, bias, minus, number;
}""")
"""Of four bytes. 0x4300 is 128 in bfloat16, whose last seven bits count ones; with the byte's sign in front of these it
is 256, which is taken off again."""
_CODE = """{{
    .reg .b32 lower, upper, number, factor, zero;
    mov.b32 factor, {factor};
    mov.b32 zero, 0x80008000;
    prmt.b32 lower, $2, 0, 0x1404;
    prmt.b32 upper, $2, 0, 0x3424;
    shr.b32 number, lower, {shift};
    and.b32 number, number, {bits};
    lop3.b32 number, lower, 0x80008000, number, 0xea;
    {multiply} $0, number, factor{plus};
    shr.b32 number, upper, {shift};
    and.b32 number, number, {bits};
    lop3.b32 number, upper, 0x80008000, number, 0xea;
    {multiply} $1, number, factor{plus};
}}"""
_E4M3_BFLOAT16 = constant(
    _CODE.format(shift=4, bits="0x07f007f0", multiply="fma.rn.bf16x2", factor="0x7b807b80", plus=", zero")
)
_E4M3_FLOAT16 = constant(_CODE.format(shift=1, bits="0x3f803f80", multiply="mul.f16x2", factor="0x5c005c00", plus=""))
"""Of four bytes, moved to where exponent and mantissa are. The exponents' difference is a factor: 2^120, or 2^8."""
_E4M3_FLOAT16_89 = constant("""{
    .reg .b16 lower, upper;
    mov.b32 {lower, upper}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lower;
    cvt.rn.f16x2.e4m3x2 $1, upper;
}""")
_INT8_FLOAT32 = constant("""{
    .reg .b32 unsigned, number;
    xor.b32 unsigned, $4, 0x80808080;
    prmt.b32 number, unsigned, 0x4b000000, 0x7440;
    add.f32 $0, number, 0fcb000080;
    prmt.b32 number, unsigned, 0x4b000000, 0x7441;
    add.f32 $1, number, 0fcb000080;
    prmt.b32 number, unsigned, 0x4b000000, 0x7442;
    add.f32 $2, number, 0fcb000080;
    prmt.b32 number, unsigned, 0x4b000000, 0x7443;
    add.f32 $3, number, 0fcb000080;
}""")
"""Of four bytes: 0x4b000000 is 2^23, behind which whole numbers are the last bits."""


def _words_code(first: str, add: str, halves: tuple[str, ...] = ("0x5410", "0x7632")) -> str:
    """Registers of two numbers each, from two words and their offset twice: the codes at the same place of both words
    come together, become the last bits of a large number, and lose that and their zero again. Eight of both halves of
    words, or four of one."""
    count = 4 * len(halves)
    lines = [".reg .b32 half, part, one;", "mov.b32 one, 0x3f803f80;"]
    for half, order in enumerate(halves):
        lines.append(f"prmt.b32 half, ${count}, ${count + 1}, {order};")
        for place in range(4):
            source = "half" if place == 0 else "part"
            if place:
                lines.append(f"shr.b32 part, half, {4 * place};")
            lines.append(f"lop3.b32 part, {source}, 0x000f000f, {first}, 0xea;")
            lines.append(add.format(4 * half + place, count + 2))
    return "{\n" + "\n".join(lines) + "\n}"


_BFLOAT16 = ("0x43004300", "fma.rn.bf16x2 ${}, part, one, ${};")
_FLOAT16 = ("0x64006400", "add.f16x2 ${}, part, ${};")
WORDS_BFLOAT16 = constant(_words_code(*_BFLOAT16))
WORDS_FLOAT16 = constant(_words_code(*_FLOAT16))
LOWER_BFLOAT16, UPPER_BFLOAT16 = (constant(_words_code(*_BFLOAT16, (order,))) for order in ("0x5410", "0x7632"))
LOWER_FLOAT16, UPPER_FLOAT16 = (constant(_words_code(*_FLOAT16, (order,))) for order in ("0x5410", "0x7632"))

_LARGE_BFLOAT16 = constant(_words_code("0x43004300", "mov.b32 ${}, part;"))
_LARGE_FLOAT16 = constant(_words_code("0x64006400", "mov.b32 ${}, part;"))

_ONES_BFLOAT16 = constant(" ".join(f"mov.b32 ${place}, 0x3f803f80;" for place in range(8)))
_ONES_FLOAT16 = constant(" ".join(f"mov.b32 ${place}, 0x3c003c00;" for place in range(8)))
_EIGHT = constant("=r,=r,=r,=r,=r,=r,=r,=r,r,r")
EIGHT_WITH_OFFSET = constant("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r")
FOUR_WITH_OFFSET = constant("=r,=r,=r,=r,r,r,r")


@triton.jit
def widen(numbers, TYPE: tl.constexpr, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """int8 (INT8), or the bits of float8_e4m3fn in uint8 (E4M3), as ``TYPE``."""
    if CODE == INT8:
        return _widen_int8(numbers, TYPE, NATIVE)
    else:
        return _widen_e4m3(numbers, TYPE, NATIVE)


@triton.jit
def _pairs(numbers, CODE: tl.constexpr, TYPE: tl.constexpr):
    """Four bytes of a register as two registers of two numbers of ``TYPE``."""
    return tl.inline_asm_elementwise(CODE, "=r,=r,r", [numbers], dtype=TYPE.value, is_pure=True, pack=4)


@triton.jit
def _widen_int8(numbers, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    if NATIVE and tl.bfloat16 == TYPE:
        result = _pairs(numbers, _INT8_BFLOAT16, tl.bfloat16)
    elif NATIVE and tl.float32 == TYPE:
        result = tl.inline_asm_elementwise(
            _INT8_FLOAT32, "=r,=r,=r,=r,r", [numbers], dtype=tl.float32, is_pure=True, pack=4
        )  # fmt: skip
    else:
        result = unpack(numbers, 0, TYPE, NATIVE > 0)
    return result


@triton.jit
def _widen_e4m3(numbers, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    if NATIVE and tl.bfloat16 == TYPE:
        result = _pairs(numbers, _E4M3_BFLOAT16, tl.bfloat16)
    elif NATIVE:
        CODE: tl.constexpr = _E4M3_FLOAT16_89 if NATIVE == 2 else _E4M3_FLOAT16
        result = _pairs(numbers, CODE, tl.float16).to(TYPE)
    else:
        result = widen_bits(numbers).to(TYPE)
    return result


@triton.jit
def widen_bits(numbers):
    """The bits of float8_e4m3fn as float16, by Triton's own operations."""
    bits = numbers.to(tl.int16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return half * 256.0


@triton.jit
def word_offset(zero, TYPE: tl.constexpr):
    """What is added to codes within large numbers of ``TYPE``, so that they are numbers less ``zero``."""
    return (-word_excess(zero, TYPE)).to(TYPE)


@triton.jit
def word_excess(zero, TYPE: tl.constexpr):
    """What codes within large numbers of ``TYPE`` are larger by than numbers less ``zero``: float32."""
    LARGE: tl.constexpr = 128.0 if tl.bfloat16 == TYPE else 1024.0
    return tl.cast(zero, tl.float32) + LARGE


@triton.jit
def widen_words(words, offset, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Words [N, 16] of a tile of 128 columns as eight [N, 16] of 16 columns each, in ``TYPE``; ``offset`` [N, 1] by
    `word_offset`."""
    both = tl.broadcast_to(offset, words.shape)
    if NATIVE:
        CODE: tl.constexpr = WORDS_BFLOAT16 if tl.bfloat16 == TYPE else WORDS_FLOAT16
        found = tl.inline_asm_elementwise(
            CODE, EIGHT_WITH_OFFSET, [words, both], is_pure=True, pack=2,
            dtype=(
                TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value,
            ),
        )  # fmt: skip
    else:
        found = (
            _code_at(words, 0, both, TYPE), _code_at(words, 4, both, TYPE), _code_at(words, 8, both, TYPE),
            _code_at(words, 12, both, TYPE), _code_at(words, 16, both, TYPE), _code_at(words, 20, both, TYPE),
            _code_at(words, 24, both, TYPE), _code_at(words, 28, both, TYPE),
        )  # fmt: skip
    return found


@triton.jit
def _code_at(words, SHIFT: tl.constexpr, offset, TYPE: tl.constexpr):
    LARGE: tl.constexpr = 128.0 if tl.bfloat16 == TYPE else 1024.0
    return (((words >> SHIFT) & 15).to(tl.float32) + LARGE + offset.to(tl.float32)).to(TYPE)


@triton.jit
def eight_of(words, CODE: tl.constexpr, TYPE: tl.constexpr):
    """Eight tensors of ``TYPE`` shaped as ``words``, which ``CODE`` makes from two words at a time."""
    return tl.inline_asm_elementwise(
        CODE, _EIGHT, [words], is_pure=True, pack=2,
        dtype=(TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value),
    )  # fmt: skip


@triton.jit
def large_words(words, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """`widen_words` without an offset: codes within large numbers, which are exact in ``TYPE``."""
    if NATIVE:
        CODE: tl.constexpr = _LARGE_BFLOAT16 if tl.bfloat16 == TYPE else _LARGE_FLOAT16
        found = eight_of(words, CODE, TYPE)
    else:
        found = widen_words(words, tl.zeros(words.shape, tl.float32), TYPE, NATIVE)
    return found


@triton.jit
def ones_like_words(words, TYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Ones in the form of `large_words`, in the same registers: with a plain constant, tensor cores would want their
    other operand in two orders."""
    if NATIVE:
        CODE: tl.constexpr = _ONES_BFLOAT16 if tl.bfloat16 == TYPE else _ONES_FLOAT16
        found = eight_of(words, CODE, TYPE)
    else:
        one = tl.full(words.shape, 1.0, tl.float32).to(TYPE)
        found = (one, one, one, one, one, one, one, one)
    return found
