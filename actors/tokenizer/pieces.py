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
    """Token ids [P], and offsets [2 P]: of each its first character in the text, and the one behind its last. Of tokens
    that stand for none, as those that begin every text, both are 0."""

    ids: Int32Array
    offsets: Int32Array


@dataclass(frozen=True, slots=True)
class Piece:
    """``text`` as the tokens of ``encoding`` without the first ``skip``; these stand for ``front`` characters before
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
        """Of the piece's tokens, one after another, if it begins at this character."""
        return (place - self.front + begin for place in chain.from_iterable(self.encoding.offsets[self.skip :]))


def placed(pieces: Sequence[Piece]) -> Placed:
    """All of them, in order."""
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
