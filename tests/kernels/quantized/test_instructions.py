"""The inline assembly that makes numbers of 16 bits, run here instruction by instruction: exact for every number.

No GPU is needed. `tests/gpu/quantized/test_quantized_products.py` runs the same on one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pytest
import torch

from pagebus.kernels.coded import quads, unpack, word_values
from pagebus.kernels.quantized.values import E2M1

Registers = dict[str, int]


def prmt(a: int, b: int, selector: int) -> int:
    """Four of eight bytes."""
    both = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    assert all(not selector >> 4 * place & 8 for place in range(4))
    return int.from_bytes(bytes(both[selector >> 4 * place & 7] for place in range(4)), "little")


def lanes(word: int, dtype: torch.dtype) -> list[float]:
    """Two numbers of 16 bits in a register."""
    halves = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16)
    return halves.view(dtype).double().tolist()


def pack(values: list[float], dtype: torch.dtype) -> int:
    """Rounded, though nothing here needs it."""
    low, high = torch.tensor(values, dtype=torch.float64).to(dtype).view(torch.uint16).tolist()
    return int(low) | int(high) << 16


def fma(dtype: torch.dtype) -> Callable[..., int]:
    """Of two numbers at once; without the third operand a product, without the factor a sum."""
    return lambda a, b, c: pack(
        [x * y + z for x, y, z in zip(lanes(a, dtype), lanes(b, dtype), lanes(c, dtype), strict=True)], dtype
    )


def e4m3_pair(word: int) -> int:
    """What ``cvt.rn.f16x2.e4m3x2`` does."""
    numbers = torch.tensor([word & 255, word >> 8 & 255], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return pack(numbers.double().tolist(), torch.float16)


def add_f32(a: int, b: int) -> int:
    x, y = (struct.unpack("<f", struct.pack("<I", word))[0] for word in (a, b))
    return int(struct.unpack("<I", struct.pack("<f", x + y))[0])


def f32_of_f16(half: int) -> int:
    return int(struct.unpack("<I", struct.pack("<f", lanes(half, torch.float16)[0]))[0])


BF16, F16 = torch.bfloat16, torch.float16
ONES = {BF16: 0x3F803F80, F16: 0x3C003C00}
RUN: dict[str, Callable[..., int]] = {
    "prmt.b32": prmt,
    "shr.b32": lambda a, count: a >> count,
    "shl.b32": lambda a, count: a << count,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "mov.b32": lambda a: a,
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[table],
    "fma.rn.bf16x2": fma(BF16),
    "mul.f16x2": lambda a, b: fma(F16)(a, b, 0x80008000),
    "add.f16x2": lambda a, b: fma(F16)(a, ONES[F16], b),
    "cvt.rn.f16x2.e4m3x2": e4m3_pair,
    "add.f32": add_f32,
    "cvt.f32.f16": f32_of_f16,
}


def run(code: str, outputs: int, *inputs: int) -> list[int]:
    """The registers ``$0`` and following, from those behind them."""
    registers: Registers = {f"${outputs + place}": word for place, word in enumerate(inputs)}

    def value(word: str) -> int:
        if word.startswith(("0x", "0f")) or word.isdigit():
            return int(word[2:], 16) if word[:2] in ("0x", "0f") else int(word)
        return registers[word]

    for line in filter(None, (each.strip() for each in code.strip().strip("{}").split(";"))):
        if line.startswith(".reg"):
            continue
        name, operands = line.split(" ", 1)
        pair = re.match(r"\{(\w+), (\w+)\}, (\S+)", operands)
        if pair:
            word = value(pair[3])
            registers |= {pair[1]: word & 0xFFFF, pair[2]: word >> 16}
            continue
        target, *given = (each.strip() for each in operands.split(","))
        registers[target] = RUN[name](*map(value, given)) & 0xFFFFFFFF
    return [registers[f"${place}"] for place in range(outputs)]


BYTES = [tuple(range(first, first + 4)) for first in range(0, 256, 4)]
CODES: dict[str, tuple[str, torch.dtype, torch.dtype]] = {
    "int8 in bfloat16": (unpack._INT8_BFLOAT16.value, torch.int8, BF16),
    "e4m3 in bfloat16": (unpack._E4M3_BFLOAT16.value, torch.float8_e4m3fn, BF16),
    "e4m3 in float16": (unpack._E4M3_FLOAT16.value, torch.float8_e4m3fn, F16),
    "e4m3 in float16, since sm_89": (unpack._E4M3_FLOAT16_89.value, torch.float8_e4m3fn, F16),
}


FLOAT32 = {
    "int8": (unpack._INT8_FLOAT32.value, torch.int8),
    "int8 in words": (quads._INT8.value, torch.int8),
    "e4m3 in words": (quads._E4M3.value, torch.float8_e4m3fn),
    "e4m3 in words, since sm_89": (quads._E4M3_89.value, torch.float8_e4m3fn),
}


def meant(numbers: tuple[int, ...], dtype: torch.dtype) -> list[float]:
    return torch.tensor(numbers, dtype=torch.uint8).view(dtype).double().tolist()


@pytest.mark.parametrize("name", CODES)
def test_every_byte(name: str) -> None:
    """Four at a time, in their order. 0x7f and 0xff are no numbers in e4m3, and are not loaded."""
    code, stored, dtype = CODES[name]
    for four in BYTES:
        out = run(code, 2, int.from_bytes(bytes(four), "little"))
        found = [number for word in out for number in lanes(word, dtype)]
        for number, wanted, bits in zip(found, meant(four, stored), four, strict=True):
            assert number == wanted or bits & 127 == 127, bits


@pytest.mark.parametrize("name", FLOAT32)
def test_every_byte_in_float32(name: str) -> None:
    """Four at a time, in their order; 0x7f and 0xff as above."""
    code, stored = FLOAT32[name]
    for four in BYTES:
        out = run(code, 4, int.from_bytes(bytes(four), "little"))
        found = [struct.unpack("<f", struct.pack("<I", word))[0] for word in out]
        for number, wanted, bits in zip(found, meant(four, stored), four, strict=True):
            assert number == wanted or (stored != torch.int8 and bits & 127 == 127), bits


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("zero", [0, 8, 15])
def test_every_code(dtype: torch.dtype, zero: int) -> None:
    """At each place of two words; the offset is what `word_offset` gives."""
    code = (unpack.WORDS_BFLOAT16 if dtype == BF16 else unpack.WORDS_FLOAT16).value
    offset = -(128 if dtype == BF16 else 1024) - zero
    for turn in range(16):
        codes = [[(turn + 3 * place + 5 * word) % 16 for place in range(8)] for word in range(2)]
        words = [sum(each << 4 * place for place, each in enumerate(row)) for row in codes]
        out = run(code, 8, *words, pack([offset, offset], dtype))
        for place, word in enumerate(out):
            assert lanes(word, dtype) == [codes[0][place] - zero, codes[1][place] - zero]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_float_of_four_bits(dtype: torch.dtype) -> None:
    """At each place of two words, minus nothing too."""
    code = (word_values._BFLOAT16 if dtype == BF16 else word_values._FLOAT16).value
    for turn in range(16):
        codes = [[(turn + 3 * place + 5 * word) % 16 for place in range(8)] for word in range(2)]
        words = [sum(each << 4 * place for place, each in enumerate(row)) for row in codes]
        for place, word in enumerate(run(code, 8, *words)):
            assert lanes(word, dtype) == [E2M1[codes[0][place]], E2M1[codes[1][place]]]
