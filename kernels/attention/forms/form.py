"""The forms, and the names of heads by which they are chosen and stored."""

from __future__ import annotations

from typing import NamedTuple


class DecodeForm(NamedTuple):
    """``tile``: tokens of a program's step; ``apart``: whether a program has tokens of one row only, where lengths
    allow that (:func:`pagebus.kernels.attention.decode_plan.plan_decodes`)."""

    tile: int = 64
    apart: bool = False

    def __str__(self) -> str:
        return f"tiles of {self.tile}, rows {'apart' if self.apart else 'end to end'}"


USUAL = DecodeForm()
"""Of all that was not measured."""
FORMS = (USUAL, DecodeForm(apart=True), DecodeForm(32), DecodeForm(32, apart=True))


class DecodeHeads(NamedTuple):
    """KV heads, query heads of each, their size, and the bytes of a number in the cache."""

    kv_heads: int
    group: int
    head_dim: int
    cache_bytes: int

    @property
    def name(self) -> str:
        """``attention:2x16x128`` of 2 KV heads and 32 query heads; ``attention:2x16x128:8`` over a cache of 8 bits."""
        name = f"attention:{self.kv_heads}x{self.group}x{self.head_dim}"
        return name if self.cache_bytes == 2 else f"{name}:{8 * self.cache_bytes}"
