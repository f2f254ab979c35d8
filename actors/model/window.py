"""Which blocks of a sequence a sliding window keeps: no query to come reads those wholly behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagebus.bus.messages import Int32Array


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees at most ``num_tokens`` tokens, itself among them; 0: all, and every block is kept."""

    num_tokens: int
    block_size: int

    def first_block(self, num_computed: int) -> int:
        """The first block that queries see behind ``num_computed`` tokens."""
        return max(0, num_computed - self.num_tokens + 1) // self.block_size if self.num_tokens else 0

    def first_blocks(self, num_computed: Int32Array) -> Int32Array:
        """The same of several sequences [n]; there is a window."""
        first = num_computed - np.int32(self.num_tokens - 1)
        np.maximum(first, 0, out=first)
        first //= np.int32(self.block_size)
        return first

    def most_blocks(self, num_queries: int) -> int:
        """Blocks in which ``num_queries`` tokens and all that they see lie, wherever they begin; there is a window."""
        return (self.num_tokens + num_queries + self.block_size - 3) // self.block_size + 1

    @property
    def num_matched(self) -> int:
        """Blocks before a query, at the end of a cached prefix, that it sees: all of a match but for shorter ones. 0
        without a window."""
        return max(1, -(-(self.num_tokens - 1) // self.block_size)) if self.num_tokens else 0


EVERYTHING = Window(0, 1)
