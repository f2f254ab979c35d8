"""Words of eight 4-bit codes, and tokens, as operands of the matrix instruction of single warps: `mma.sync`.

That instruction adds up over 16 columns in any order. The columns of a tile of 128 are therefore dealt out so that each
thread multiplies what it can read at once: 16 bytes of a row of words, and the inputs that belong to them.

Codes are not made larger than they come. Whole numbers are the last bits of 16-bit numbers below or just above the
normal ones, which the instruction multiplies exactly; those at odd places stay 16 times too large, and have sums of
their own. Floats (E2M1) are moved to where bfloat16 has its sign, the end of its exponent, and its mantissa. What all
are too small by is a power of two, and tokens of bfloat16 are larger meanwhile, so that sums are normal numbers.
"""

from __future__ import annotations

from typing import Any

from pagebus.kernels.coded.weights import WORDS
from pagebus.kernels.common.triton import constant, gl, gluon, mma_v2, tl

WARPS = constant(8)
"""Each multiplies a tile of 128 columns of its own."""


def _whole_code() -> str:
    """Eight registers of two numbers each, from two words: the codes at the same place of both."""
    lines = [".reg .b32 half;"]
    for half, order in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 half, $8, $9, {order};")
        for place in range(4):
            if place == 2:
                lines.append("shr.b32 half, half, 8;")
            lines.append(f"and.b32 ${4 * half + place}, half, {'0x00f000f0' if place % 2 else '0x000f000f'};")
    return "{\n" + "\n".join(lines) + "\n}"


def _float_code() -> str:
    """The same of E2M1: a code's sign to bit 15, and its three others to bits 6 to 8. One product moves both, so that
    the unit that masks bits has less to do."""
    lines = [".reg .b32 half, code;"]
    for half, order in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 half, $8, $9, {order};")
        for place in range(4):
            if place == 2:
                lines.append("shr.b32 half, half, 8;")
            mask, moved = ("0x00f000f0", 1 << 8 | 1 << 2) if place % 2 else ("0x000f000f", 1 << 12 | 1 << 6)
            lines.append(f"and.b32 code, half, {mask};")
            lines.append(f"mul.lo.u32 code, code, {moved};")
            lines.append(f"and.b32 ${4 * half + place}, code, 0x81c081c0;")
    return "{\n" + "\n".join(lines) + "\n}"


_WHOLE, _FLOATS = constant(_whole_code()), constant(_float_code())
_EIGHT = constant("=r,=r,=r,=r,=r,=r,=r,=r,r,r")


@gluon.constexpr_function
def tokens_factor(dtype: Any) -> float:
    """What tokens are multiplied by."""
    return 1.0 if dtype == gl.float16 else 2.0**90


@gluon.constexpr_function
def sums_factor(code: int, dtype: Any) -> float:
    """What sums of products are to be multiplied by: a whole number's last bit is 2^-24, or 2^-133 in bfloat16, and
    exponents there begin 126 lower than those of E2M1."""
    return 2.0**24 if dtype == gl.float16 else 2.0 ** (43 if code == WORDS else 36)


@gluon.constexpr_function
def words_layout(rows: int) -> Any:
    """How warps read words [WARPS, rows, 16]."""
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2], [0, 8, 0]], lanes, warps, [], [8, rows, 16])


@gluon.constexpr_function
def tokens_layout(tokens: int) -> Any:
    """How warps read 16 inputs of each token [WARPS, tokens, 16]."""
    registers = [[0, 0, 1], [0, 0, 2]] + ([[0, 8, 0]] if tokens == 16 else [])
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8, tokens, 16])


@gluon.jit
def token_operand(x, LAYOUT: gl.constexpr):
    """Inputs as `tokens_layout` reads them, as an operand [WARPS, 16, tokens]."""
    x *= gl.full(x.shape, tokens_factor(x.dtype), x.dtype, x.type.layout)
    # Four columns of a thread: two of the instruction's lower half, and two of the upper.
    dealt = x.reshape(WARPS, x.shape[1], 4, 2, 2).permute(0, 3, 2, 4, 1)
    return gl.convert_layout(dealt.reshape(WARPS, 16, x.shape[1]), LAYOUT)


@gluon.jit
def word_operands(words, CODE: gl.constexpr, TYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Words as `words_layout` reads them, as eight operands [WARPS, rows, 16] of ``TYPE``, which are too small."""
    ROWS: gl.constexpr = words.shape[1]
    CONVERTED: gl.constexpr = _WHOLE if CODE == WORDS else _FLOATS
    slices = gl.inline_asm_elementwise(
        CONVERTED, _EIGHT, [words], is_pure=True, pack=2,
        dtype=(TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value, TYPE.value),
    )  # fmt: skip
    found: tl.tuple = ()
    for index in gl.static_range(8):
        dealt = slices[index].reshape(WARPS, ROWS, 4, 2, 2).permute(0, 1, 3, 2, 4)
        found += (gl.convert_layout(dealt.reshape(WARPS, ROWS, 16), LAYOUT),)
    return found


@gluon.jit
def group_product(w, x, CODE: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum [WARPS, rows, tokens] over the columns of one of a tile's groups of its operands' products."""
    even = gl.full([WARPS, w[0].shape[1], x[0].shape[2]], 0.0, gl.float32, LAYOUT)
    odd = even
    for index in gl.static_range(GROUP * (4 // GROUPS), (GROUP + 1) * (4 // GROUPS)):
        even = mma_v2(w[2 * index], x[2 * index], even)
        if CODE == WORDS:
            odd = mma_v2(w[2 * index + 1], x[2 * index + 1], odd)
        else:
            even = mma_v2(w[2 * index + 1], x[2 * index + 1], even)
    return even + odd * 0.0625 if CODE == WORDS else even


@gluon.constexpr_function
def _groups_layout(groups: int, rows: int) -> Any:
    """How warps read scales [WARPS * groups, rows] of a tile each: those of the rows that a thread multiplies."""
    registers = [[bit, 0] for bit in (1, 2) if bit < groups] + [[0, 8]]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[groups, 0], [2 * groups, 0], [4 * groups, 0]], [], [8 * groups, rows]
    )


@gluon.jit
def read_groups(shared, GROUPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Of shared [WARPS * GROUPS, rows], for each of a tile's groups [WARPS, rows]."""
    ROWS: gl.constexpr = shared.shape[1]
    SLICE: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    found: tl.tuple = ()
    if GROUPS == 1:
        found += (shared.load(SLICE),)
    else:
        values = shared.load(_groups_layout(GROUPS, ROWS)).reshape(WARPS, 2, 2, ROWS).permute(0, 3, 2, 1)
        for half in gl.static_range(2):
            of_half = values.split()[half]
            for quarter in gl.static_range(2):
                found += (gl.convert_layout(of_half.split()[quarter], SLICE),)
    return found


@gluon.jit
def tile_sums(x, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """The sum of a tile's inputs of each token, for each of so many rows: [WARPS, ROWS, tokens]."""
    ones = gl.full([WARPS, ROWS, 16], 1.0, x[0].dtype, gl.DotOperandLayout(0, LAYOUT, 2))
    total = gl.full([WARPS, ROWS, x[0].shape[2]], 0.0, gl.float32, LAYOUT)
    for index in gl.static_range(8):
        total = mma_v2(ones, x[index], total)
    return total
