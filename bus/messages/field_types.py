"""Types of message fields beyond JSON's scalars."""

from __future__ import annotations

from array import array
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
JsonValue = object
"""Free JSON (chat messages): checked where it enters, never interpreted by the bus."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]

NO_INTS: Int32Array = np.empty(0, np.int32)
"""The default of every array field: one for all, since there is nothing in it to change."""


def int_array(numbers: list[int]) -> Int32Array:
    """The value of an array field of such as are not negative, in a third of the time that numpy takes for a list, or
    Python for signed ones.

    Raises:
        TypeError: one is no integer.
        OverflowError: one is negative, or has more than 32 bits. Of 32 bits it becomes negative.
    """
    return np.frombuffer(array("I", numbers), np.int32) if numbers else NO_INTS


def no_ints() -> Int32Array:
    """The same, for a ``default_factory``."""
    return NO_INTS
