"""What every reader of a format is: which tensors a module has in it, and what codes and scales these hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pagebus.actors.model.quantization.scheme import Scheme

Shape = tuple[int, ...]
FLOATS = ("F32", "BF16", "F16")
E4M3 = ("F8_E4M3",)
E8M0 = ("U8", "F8_E8M0")
BIAS = "bias"
"""Of a module for which the model has a bias it is the model's, and no reader sees it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor of a module: the formats and shapes that it may have, and whether it must be there. No ``shapes``: the
    reader checks them itself. One that is not ``read`` is of no use here. ``also``: another name that files have for
    it."""

    formats: tuple[str, ...]
    shapes: tuple[Shape, ...] = ()
    needed: bool = True
    read: bool = True
    also: str | None = None

    def names(self, suffix: str) -> tuple[str, ...]:
        """All that it may be called, behind the module's name."""
        return (suffix,) if self.also is None else (suffix, self.also)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A module's weight [N, K]: ``values`` int8, float8_e4m3fn or codes of 4 bits (uint8); ``scale`` and ``zero``
    [ceil(N / rows), ceil(K / columns)] of the scheme's block, broadcast where a dimension is 1; ``whole`` (one number)
    and ``table`` [16] if the scheme has them; ``low``, shaped as ``scale``, is subtracted at the end; ``groups``
    [K]: the group of each column, if columns are ordered."""

    values: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    low: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    table: torch.Tensor | None = None
    groups: torch.Tensor | None = None


class FormatError(Exception):
    """Numbers that the format does not allow; the loader adds which module has them."""


Tensors = Mapping[str, torch.Tensor]
"""A module's tensors by what their names have behind the module's."""


@dataclass(frozen=True, slots=True)
class Reader:
    """``expected`` says what a module [N, K] of a scheme has; ``read`` makes codes of it."""

    expected: Callable[[Scheme, int, int], Mapping[str, Expected]]
    read: Callable[[Tensors, Scheme, int, int], Codes]


def groups_of(scheme: Scheme, columns: int) -> int:
    """Groups of a row of this many columns."""
    return -(-columns // scheme.block[1]) if scheme.block[1] else 1


def unused(*names: str) -> dict[str, Expected]:
    """Tensors that a module may have, but that change nothing here."""
    return {name: Expected((), needed=False, read=False) for name in names}


def unpack_bits(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [..., W] -> uint8 [..., count]: numbers of ``bits`` one after another, the first in the lowest bits of the
    first word; those of odd widths may lie in two words."""
    if 8 % bits == 0:  # byte by byte, which takes an eighth of the memory
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        data = words.to(torch.int32).contiguous().view(torch.uint8).unsqueeze(-1)
        codes: torch.Tensor = (data >> shifts) & (2**bits - 1)
        return codes.flatten(-2)[..., :count]
    first = torch.arange(count, device=words.device) * bits
    word, shift = first // 32, first % 32
    wide = words.to(torch.int64) & 0xFFFFFFFF
    both = wide[..., word] | (wide[..., (word + 1).clamp(max=words.shape[-1] - 1)] << 32)
    found: torch.Tensor = (both >> shift) & (2**bits - 1)
    return found.to(torch.uint8)


def nibbles(packed: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """uint8 [..., B] -> codes uint8 [..., 2 B]; the first of a byte is the low one, or the high one."""
    pair = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return torch.stack(pair, -1).flatten(-2)
