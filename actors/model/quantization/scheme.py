"""What a product's quantized weight is: its numbers, how they share scales, and how files pack them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Numbers: TypeAlias = Literal["e4m3", "int8", "uint8", "uint4", "e2m1", "nf4", "fp4"]
"""Of 8 bits: floats, signed, and those that have a zero point. Of 4 bits: unsigned ones (2 and 3 bits are among them),
floats, and the two tables of bitsandbytes."""
Scales: TypeAlias = Literal["float", "e8m0", "e4m3"]
"""Scales of groups: real numbers, exponents of two, or small floats beside one real number."""
Activations: TypeAlias = Literal["none", "dynamic", "static"]
"""Whether the checkpoint was made for quantized activations, with scales of each token or its own."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Of one weight [N, K]. ``packing`` names the reader of its tensors.

    Numbers of ``block`` (rows, columns) share a scale; 0 means all of them, and one scale of a whole tensor counts for
    each of its rows. ``bits`` are those in the file. ``zeros``: groups have zero points of their own; else the middle
    of the range is zero. ``lows``: something is taken off the numbers of each group, once they are multiplied.
    ``ordered``: columns are in an order of their own, by ``g_idx``. ``stored_bits``: those in the file, where the
    numbers are wider here.
    """

    packing: str
    numbers: Numbers
    bits: int
    block: tuple[int, int] = (1, 0)
    scales: Scales = "float"
    zeros: bool = False
    ordered: bool = False
    activations: Activations = "none"
    lows: bool = False
    stored_bits: int = 0

    def __str__(self) -> str:
        """``gptq, 4 bits, groups of 128, zero points, act-order``."""
        rows, columns = self.block
        shared = f"blocks of {rows}x{columns}" if rows > 1 else f"groups of {columns}" if columns else "rows"
        numbers = f"{self.stored_bits or self.bits} bits" if self._whole() else self.numbers
        words = [self.packing, numbers, shared]
        words += ["zero points"] * self.zeros + ["minima"] * self.lows + ["act-order"] * self.ordered
        return ", ".join(words + ([f"{self.activations} activations"] if self.activations != "none" else []))

    def _whole(self) -> bool:
        return self.numbers.startswith("uint") or self.stored_bits > 0


def mixed(schemes: Sequence[Scheme]) -> Scheme:
    """What holds parts of one product exactly that have groups of different ``schemes``: bytes with groups as narrow as
    the narrowest, and what is taken off them if any has that."""
    width = min(scheme.block[1] for scheme in schemes)
    return Scheme("mixed", "int8", 8, (1, width), lows=any(scheme.lows for scheme in schemes))


@dataclass(frozen=True, slots=True)
class Rule:
    """Weights whose module is meant by ``entry`` have this scheme; None: they are not quantized."""

    match: Match
    entry: str
    scheme: Scheme | None


Match: TypeAlias = Literal["name", "regex", "part", "within", "glob", "all"]
"""How an entry means a module: by its whole name; by an expression for its beginning; by whole parts of the name, such
as ``mlp.gate`` or ``model.layers.3``; by letters anywhere in it; by a pattern with stars; or as one of all."""
