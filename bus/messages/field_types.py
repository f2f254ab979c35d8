"""Types of message fields beyond JSON's scalars."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
JsonValue = object
"""Free JSON (chat messages): checked where it enters, never interpreted by the bus."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]

NO_INTS: Int32Array = np.empty(0, np.int32)
"""The default of every array field: one for all, since there is nothing in it to change."""


def no_ints() -> Int32Array:
    """The same, for a ``default_factory``."""
    return NO_INTS
