"""Sums of products of some rows of 8-bit weights with one token, without tensor cores, four columns in a word.

Each thread reads two words of a row, 8 numbers, and the 8 inputs that belong to them. Words stay whole until they are
multiplied: single bytes that a loop keeps would each take a register, and instructions to get there and back.
"""

from __future__ import annotations

from pagebus.kernels.coded.scales import load_scale
from pagebus.kernels.coded.unpack import widen_bits
from pagebus.kernels.coded.weights import INT8
from pagebus.kernels.common.triton import constant, tl, triton

_FLOATS = """
    mov.b32 {{first, second}}, {0};
    cvt.f32.f16 ${1}, first;
    cvt.f32.f16 ${2}, second;"""
_E4M3_89 = constant(
    "{\n.reg .b16 first, second, lower, upper;\n.reg .b32 one, two;\nmov.b32 {lower, upper}, $4;"
    "cvt.rn.f16x2.e4m3x2 one, lower;\ncvt.rn.f16x2.e4m3x2 two, upper;"
    + _FLOATS.format("one", 0, 1) + _FLOATS.format("two", 2, 3) + "\n}"
)  # fmt: skip
_E4M3 = constant(
    "{\n.reg .b16 first, second;\n.reg .b32 lower, upper, number, factor;\nmov.b32 factor, 0x5c005c00;\n"
    "prmt.b32 lower, $4, 0, 0x1404;\nprmt.b32 upper, $4, 0, 0x3424;\n"
    + "".join(
        f"shr.b32 number, {half}, 1;\nand.b32 number, number, 0x3f803f80;\n"
        f"lop3.b32 number, {half}, 0x80008000, number, 0xea;\nmul.f16x2 number, number, factor;"
        + _FLOATS.format("number", place, place + 1)
        for place, half in ((0, "lower"), (2, "upper"))
    )
    + "\n}"
)
"""By way of float16: as `pagebus.kernels.coded.unpack` has it, or by the instruction of newer GPUs."""
_INT8 = constant(
    "{\n.reg .b32 unsigned, number;\nxor.b32 unsigned, $4, 0x80808080;\n"
    + "".join(
        f"prmt.b32 number, unsigned, 0x4b000000, 0x744{place};\nadd.f32 ${place}, number, 0fcb000080;\n"
        for place in range(4)
    )
    + "}"
)
"""0x4b000000 is 2^23, behind which whole numbers are the last bits."""


@triton.jit
def quads(numbers_ptr, row, k, size, EVEN_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The numbers of ``row`` [N] from column ``k`` on in words of four: int32 [N, BLOCK_K / 4]; ``size`` is a multiple
    of 4."""
    place = tl.arange(0, BLOCK_K // 4)
    # Written so that the compiler reads two words at once, not four: as many as inputs.
    place = k // 4 + place // 2 * 2 + place % 2
    words = numbers_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    words += row.to(tl.int64)[:, None] * (size // 4) + place[None, :]
    if EVEN_K:
        return tl.load(words, mask=k < size, other=0)
    else:
        return tl.load(words, mask=(place < size // 4)[None, :], other=0)


@triton.jit
def quads_vector(
    words,  # the first ones, by `quads`
    x_ptr,  # [K] in 16 bits, at an address divisible by 8
    numbers_ptr,  # [N, K], int8, or the bits of float8_e4m3fn
    scale_ptr,  # [N]
    row,  # [N]: of the weight
    size,  # K
    CODE: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,  # 1 or 2 blocks of words in flight
    NATIVE: tl.constexpr,
):
    """The products of these rows with the token: float32 [N, 1]."""
    scale = load_scale(scale_ptr, row)[:, None]
    place = tl.arange(0, BLOCK_K // 4)
    inputs = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + place[None, :]
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros(words.shape, tl.float32)
    if AHEAD == 2:
        second = quads(numbers_ptr, row, BLOCK_K, size, EVEN_K, BLOCK_K)
    for k in range(0, size, BLOCK_K):
        fetched = quads(numbers_ptr, row, k + AHEAD * BLOCK_K, size, EVEN_K, BLOCK_K)
        if EVEN_K:
            x = tl.load(inputs + k // 4)
        else:
            x = tl.load(inputs + k // 4, mask=(k // 4 + place < size // 4)[None, :], other=0)
        w = _floats(words, CODE, NATIVE)
        for index in tl.static_range(4):
            acc += w[index] * (x >> (16 * index)).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        if AHEAD == 2:
            words = second
            second = fetched
        else:
            words = fetched
    return tl.sum(acc, axis=1)[:, None] * scale


@triton.jit
def _floats(words, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """The four numbers of each word, float32, each as words' shape."""
    if NATIVE:
        INSTRUCTIONS: tl.constexpr = _INT8 if CODE == INT8 else _E4M3_89 if NATIVE == 2 else _E4M3
        found = tl.inline_asm_elementwise(
            INSTRUCTIONS, "=r,=r,=r,=r,r", [words], is_pure=True, pack=1,
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        )  # fmt: skip
    else:
        found = _float(words, CODE), _float(words >> 8, CODE), _float(words >> 16, CODE), _float(words >> 24, CODE)
    return found


@triton.jit
def _float(words, CODE: tl.constexpr):
    """The lowest byte of each."""
    if CODE == INT8:
        return words.to(tl.int8).to(tl.float32)
    else:
        return widen_bits((words & 0xFF).to(tl.uint8)).to(tl.float32)
