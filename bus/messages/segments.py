"""The segment of a prompt's token, in the token's id: encoders tell a pair's texts apart by it.

It goes to the executor as prompts do, so that nothing between has to know. Ids of vocabularies are far below the bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagebus.bus.messages.field_types import Int32Array

SEGMENT_SHIFT = 30
TOKEN_MASK = (1 << SEGMENT_SHIFT) - 1


def with_segments(ids: Int32Array, segments: NDArray[np.integer]) -> Int32Array:
    """``ids`` [n] with the ``segments`` [n], 0 or 1, of their tokens."""
    return (ids | (segments.astype(np.int32) << SEGMENT_SHIFT)).astype(np.int32)


def without_segments(ids: Int32Array) -> Int32Array:
    """``ids`` [n] as the vocabulary has them. Negative ones stay negative, for those who check ids."""
    return np.where(ids < 0, ids, ids & TOKEN_MASK).astype(np.int32)
