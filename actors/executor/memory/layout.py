"""Offsets of the blocks in a piece of memory: one after another, or in chunks with gaps between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Layout:
    """``per_chunk`` blocks of ``block_bytes`` bytes every ``stride`` bytes; 0: all blocks are in one chunk."""

    block_bytes: int
    per_chunk: int = 0
    stride: int = 0

    def offsets(self, blocks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Offsets of blocks in bytes."""
        wide = blocks.astype(np.int64)
        if not self.per_chunk:
            return wide * self.block_bytes
        return wide // self.per_chunk * self.stride + wide % self.per_chunk * self.block_bytes

    def offset(self, block: int) -> int:
        """The offset of one block in bytes."""
        if not self.per_chunk:
            return block * self.block_bytes
        return block // self.per_chunk * self.stride + block % self.per_chunk * self.block_bytes
