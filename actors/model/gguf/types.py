"""Formats of tensors in GGUF files: how many numbers share a block, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagebus.actors.model.quantization.scheme import Scheme

PACKING = "gguf"


@dataclass(frozen=True, slots=True)
class BlockType:
    """``numbers`` of a row lie together in ``size`` bytes; ``scheme`` None: plain numbers, as safetensors has them."""

    name: str
    numbers: int
    size: int
    scheme: Scheme | None = None


def _words(name: str, group: int, *, lows: bool) -> Scheme:
    return Scheme(f"{PACKING}_{name}", "uint4", 4, (1, group), lows=lows)


def _bytes(name: str, group: int, *, bits: int, lows: bool = False) -> Scheme:
    return Scheme(f"{PACKING}_{name}", "int8", 8, (1, group), lows=lows, stored_bits=bits)


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18, _words("q4_0", 32, lows=False)),
    3: BlockType("Q4_1", 32, 20, _words("q4_1", 32, lows=True)),
    6: BlockType("Q5_0", 32, 22, _bytes("q5_0", 32, bits=5)),
    7: BlockType("Q5_1", 32, 24, _bytes("q5_1", 32, bits=5, lows=True)),
    8: BlockType("Q8_0", 32, 34, _bytes("q8_0", 32, bits=8)),
    12: BlockType("Q4_K", 256, 144, _words("q4_k", 32, lows=True)),
    13: BlockType("Q5_K", 256, 176, _bytes("q5_k", 32, bits=5, lows=True)),
    14: BlockType("Q6_K", 256, 210, _bytes("q6_k", 16, bits=6)),
}
"""The types that are read, by their number in files."""
REFUSED: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
BY_NAME: Mapping[str, BlockType] = {each.name: each for each in TYPES.values()}


def row_bytes(name: str, columns: int) -> int | None:
    """Bytes of a row; None for a type that is not GGUF's, or a row that is not of whole blocks."""
    kind = BY_NAME.get(name)
    if kind is None or columns % kind.numbers:
        return None
    return columns // kind.numbers * kind.size
