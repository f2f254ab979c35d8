"""Sets of tokens as text."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagebus.actors.model.token_bits import fits, from_bits, to_bits


def test_there_and_back() -> None:
    """Any list of ids, in any order, with repeats."""
    rng = random.Random(0)
    for vocab_size in (1, 8, 9, 1000, 151_936):
        ids = [rng.randrange(vocab_size) for _ in range(500)]
        text = to_bits(ids)
        assert np.flatnonzero(from_bits(text)).tolist() == sorted(set(ids))
        assert fits(text, vocab_size)
        assert len(to_bits(range(vocab_size))) <= 4 * (vocab_size // 24 + 2)


WRONG = [to_bits([8]), to_bits([1000]), "no base64!", "AAAA", "A", "é", to_bits([3]) * 10]


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:9])
def test_what_does_not_fit(text: str) -> None:
    """Ids outside the vocabulary of 8, none at all, and what is no set of tokens."""
    assert not fits(text, 8)
