"""Where the device keeps what it knows of every slot: all in one flat array, so that one kernel writes every change."""

from __future__ import annotations

from dataclasses import dataclass

ALIGN = 4
"""In words: 16 bytes, what Triton specialises pointers on."""
NUM_COLUMNS = 8
"""Sampling columns, see :mod:`actors.executor.batch`."""


def aligned(count: int) -> int:
    """``count`` words, rounded up."""
    return -(-count // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Tables of ``num_slots`` slots in int32 words, one behind the other: seeds [S, 2] (int64), columns [8, S], block
    tables [S, ``table_width``] and tokens [S, ``max_tokens``]. The properties are the words where they begin."""

    num_slots: int
    table_width: int
    max_tokens: int

    @property
    def columns(self) -> int:
        return aligned(2 * self.num_slots)

    @property
    def block_tables(self) -> int:
        return self.columns + aligned(NUM_COLUMNS * self.num_slots)

    @property
    def tokens(self) -> int:
        return self.block_tables + aligned(self.num_slots * self.table_width)

    @property
    def size(self) -> int:
        return self.tokens + self.num_slots * self.max_tokens
