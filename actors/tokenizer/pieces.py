"""Texts that are encoded piece by piece, and where in the whole text each of their tokens is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Encoding, Tokenizer

from pagebus.bus.messages import Int32Array


@dataclass(frozen=True, slots=True)
class Placed:
    """Token ids [P], and offsets [2 P]: the place of each token's first character in the text, and the one after its
    last. Both are 0 for tokens that stand for no text, such as one that begins every prompt."""

    ids: Int32Array
    offsets: Int32Array


@dataclass(frozen=True, slots=True)
class Piece:
    """``text`` as the tokens of ``encoding`` without the first ``skip``, which stand for ``front`` characters before
    it."""

    text: str
    encoding: Encoding
    skip: int = 0
    front: int = 0

    @property
    def ids(self) -> list[int]:
        ids: list[int] = self.encoding.ids
        return ids[self.skip :]

    def offsets(self, begin: int) -> Iterator[int]:
        """The offsets of its tokens, one after another, if it begins at character ``begin``."""
        return (place - self.front + begin for place in chain.from_iterable(self.encoding.offsets[self.skip :]))


def placed(pieces: Sequence[Piece]) -> Placed:
    """The tokens of all pieces, in order."""
    ids: list[int] = []
    offsets: list[int] = []
    begin = 0
    for piece in pieces:
        ids += piece.ids
        offsets += piece.offsets(begin)
        begin += len(piece.text)
    return Placed(np.array(ids, np.int32), np.array(offsets, np.int32))


def continued(tokenizer: Tokenizer, text: str) -> Piece:
    """``text`` inside another one: encoded behind a line break, so that no space is put in front of it."""
    before = tokenizer.encode("\n", add_special_tokens=False).ids
    encoding = tokenizer.encode("\n" + text, add_special_tokens=False)
    if encoding.ids[: len(before)] == before:
        return Piece(text, encoding, skip=len(before), front=1)
    return Piece(text, tokenizer.encode(text, add_special_tokens=False))
