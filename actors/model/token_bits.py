"""Sets of tokens as text with a bit per token. A list of a whole vocabulary would take each actor it passes
milliseconds to read and write, on the loop that all requests share."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LONG_LIST = 1024
"""Lists of at least this many ids are sent as bits."""


def to_bits(ids: Sequence[int]) -> str:
    """The ids, which are not negative, as base64 of their bits, the lowest first; up to the highest of them."""
    places = np.array(ids, np.int64)
    bits = np.zeros(int(places.max()) + 1, np.bool_)
    bits[places] = True
    return base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode()


def from_bits(text: str) -> NDArray[np.bool_]:
    """A bool per token [V rounded up to 8].

    Raises:
        ValueError: it is no such text.
    """
    try:
        packed = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except binascii.Error as error:
        raise ValueError(f"not a set of tokens: {error}") from None
    return np.unpackbits(packed, bitorder="little").view(np.bool_)


def fits(text: str, vocab_size: int) -> bool:
    """Whether it is a set of some tokens, and all of them are in the vocabulary."""
    if len(text) > 4 * (vocab_size // 24 + 2):
        return False
    try:
        bits = from_bits(text)
    except ValueError:
        return False
    return bool(bits.any()) and not bits[vocab_size:].any()
