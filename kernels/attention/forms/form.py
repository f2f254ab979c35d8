"""The forms, and the names of heads by which they are chosen and stored."""

from __future__ import annotations

from typing import NamedTuple


class DecodeForm(NamedTuple):
    """``tile``: tokens of a program's step; ``apart``: whether a program has tokens of one row only, where lengths
    allow that (:func:`pagebus.kernels.attention.decode_plan.plan_decodes`); ``stages``: tiles on their way at once,
    over a cache of 16 bits (of 8 bits one more)."""

    tile: int = 64
    apart: bool = False
    stages: int = 2

    def __str__(self) -> str:
        return f"tiles of {self.tile}, {self.stages} stages, rows {'apart' if self.apart else 'end to end'}"


USUAL = DecodeForm()
"""Of all that was not measured."""
FORMS = (
    USUAL, DecodeForm(apart=True), DecodeForm(32), DecodeForm(32, apart=True), DecodeForm(32, stages=4),
    DecodeForm(32, apart=True, stages=4),
)  # fmt: skip
"""All that are tried."""


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
