"""Tokens a sequence may not have, host side: which slots are restricted, and what the device must know of them.

A slot may have a mask (the only tokens allowed, one bit each) and a list of words of several tokens. Words of one token
are bans among the slot's rules. Rows of a table stay on the device until another sequence needs the row to be another.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pagebus.actors.model.token_bits import from_bits
from pagebus.bus.messages import Int32Array, NewSequence, SamplingParams

MIN_WIDTH = 16


class TokenMasks:
    """Collects the rows of sequences that enter, then hands them over with :meth:`pack`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._mask_words = -(-vocab_size // 32)
        self._width = MIN_WIDTH
        self._masked: set[int] = set()
        self._worded: set[int] = set()
        self._new_masks: list[tuple[int, SamplingParams]] = []
        self._new_words: list[tuple[int, list[tuple[int, ...]]]] = []

    def enter(self, new: NewSequence) -> None:
        """Note the rows of a sequence that enters its slot."""
        slot, sampling = new.slot, new.sampling
        words = long_words(sampling, self._vocab_size)
        masked = bool(sampling.allowed_token_ids or sampling.allowed_tokens)
        if masked or slot in self._masked:
            self._new_masks.append((slot, sampling))
            (self._masked.add if masked else self._masked.discard)(slot)
        if words or slot in self._worded:
            self._new_words.append((slot, words))
            (self._worded.add if words else self._worded.discard)(slot)

    def pack(self, deltas: dict[str, Int32Array]) -> None:
        """Put what was noted into ``deltas``: ``mask_slots`` [m] with ``mask_words`` [m * ceil(V / 32)], and
        ``word_slots`` [w] with ``word_tokens``, ``word_lens`` [w * F], F never smaller than before."""
        if self._new_masks:
            deltas["mask_slots"] = np.array([slot for slot, _ in self._new_masks], np.int32)
            deltas["mask_words"] = np.concatenate([self._mask(sampling) for _, sampling in self._new_masks])
            self._new_masks = []
        if self._new_words:
            self._pack_words(deltas)
            self._new_words = []

    def _mask(self, sampling: SamplingParams) -> Int32Array:
        """One bit per token; all set where nothing is restricted."""
        bits = np.full(self._mask_words * 32, not (sampling.allowed_token_ids or sampling.allowed_tokens), np.bool_)
        if sampling.allowed_token_ids:
            ids = np.array(sampling.allowed_token_ids, np.int64)
            bits[ids[(ids >= 0) & (ids < self._vocab_size)]] = True
        if sampling.allowed_tokens:
            given = from_bits(sampling.allowed_tokens)[: self._vocab_size]
            bits[: len(given)] |= given
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _pack_words(self, deltas: dict[str, Int32Array]) -> None:
        longest = max(sum(map(len, words)) for _, words in self._new_words)
        while self._width < longest:
            self._width *= 2
        tokens = np.zeros((len(self._new_words), self._width), np.int32)
        lens = np.zeros_like(tokens)
        for row, (_, words) in enumerate(self._new_words):
            end = 0
            for word in words:
                start, end = end, end + len(word)
                tokens[row, start:end] = word
                lens[row, end - 1] = len(word)
        deltas["word_slots"] = np.array([slot for slot, _ in self._new_words], np.int32)
        deltas["word_tokens"], deltas["word_lens"] = tokens.reshape(-1), lens.reshape(-1)


def banned_tokens(sampling: SamplingParams) -> Iterable[int]:
    """Bad words of one token: always banned."""
    return (word[0] for word in sampling.bad_words_token_ids if len(word) == 1)


def long_words(sampling: SamplingParams, vocab_size: int) -> list[tuple[int, ...]]:
    """Bad words of several tokens; one with a token outside the vocabulary can never be written."""
    return [
        word for word in sampling.bad_words_token_ids if len(word) > 1 and min(word) >= 0 and max(word) < vocab_size
    ]
