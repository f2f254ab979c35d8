"""Lengths of the text of each token, for clients whose ingress needs them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from pagebus.bus.messages import Int32Array


class TextLengths:
    """Builds the columns of a reply batch that say so, for the choices that tell it."""

    def __init__(self) -> None:
        self._told: dict[int, list[int]] = {}

    def add(self, row: int, texts: Sequence[str], num_tokens: int) -> None:
        """The choice in this row has ``num_tokens`` new tokens, and a text for each; perhaps one more, which was held
        back until its end, and goes with the last."""
        lengths = [len(text) for text in texts[:num_tokens]]
        if lengths:
            lengths[-1] += sum(map(len, texts[num_tokens:]))
            self._told[row] = lengths

    def fields(self, num_rows: int) -> dict[str, Int32Array]:
        """Fields of a :class:`ReplyBatch`; none if no choice reports lengths."""
        if not self._told:
            return {}
        counts = np.zeros(num_rows, np.int32)
        for row, lengths in self._told.items():
            counts[row] = len(lengths)
        return {
            "length_counts": counts,
            "text_lengths": np.array(list(chain.from_iterable(self._told.values())), np.int32),
        }
