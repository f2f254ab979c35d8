"""Puts the segment of a prompt's token into a high bit of its id: encoders tell the texts of a pair apart by it.

Segments thus reach the executor with the prompt, and nothing in between has to know of them. Token ids are far below
the bit.
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
    """``ids`` [n] without segments. Negative ids stay negative, so that checks of ids find them."""
    return np.where(ids < 0, ids, ids & TOKEN_MASK).astype(np.int32)
