"""Hashes of token blocks."""

from __future__ import annotations

import numpy as np
import pytest

from pagebus.actors.model.block_hash import HASH_BYTES, hash_blocks, hash_next, hashes_from_array, hashes_to_array

TOKENS = np.arange(100, 140, dtype=np.int32)


def test_one_hash_per_full_block() -> None:
    """A partial last block has none."""
    hashes = hash_blocks(TOKENS, 16)
    assert [len(each) for each in hashes] == [HASH_BYTES, HASH_BYTES]
    assert hash_blocks(TOKENS[:15], 16) == []


def test_a_hash_stands_for_all_tokens_before_it() -> None:
    """One other token changes the hashes of its block and of all after it, and none before."""
    changed = TOKENS.copy()
    changed[10] += 1
    ours, theirs = hash_blocks(TOKENS, 8), hash_blocks(changed, 8)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [True, False, False, False, False]


def test_a_chain_can_be_continued() -> None:
    """Hashing the rest after a parent is the same as hashing all."""
    whole = hash_blocks(TOKENS, 8)
    assert whole == hash_blocks(TOKENS[:16], 8) + hash_blocks(TOKENS[16:].tolist(), 8, parent=whole[1])
    assert whole[2] == hash_next(whole[1], TOKENS[16:24].tobytes())


def test_a_salt_changes_everything() -> None:
    """No salt, an empty one and None are the same."""
    plain = hash_blocks(TOKENS, 8)
    assert plain == hash_blocks(TOKENS, 8, salt="") == hash_blocks(TOKENS, 8, salt=None)
    assert not set(plain) & set(hash_blocks(TOKENS, 8, salt="tenant"))
    assert hash_blocks(TOKENS, 8, salt="tenant") == hash_blocks(TOKENS, 8, salt=b"tenant")


def test_hashes_travel_as_integers() -> None:
    """Four int32 each, there and back."""
    hashes = hash_blocks(TOKENS, 8)
    array = hashes_to_array(hashes)
    assert (array.dtype, array.shape) == (np.int32, (20,))
    assert hashes_from_array(array) == hashes
    assert hashes_from_array(hashes_to_array([])) == []
    with pytest.raises(ValueError, match="no whole number"):
        hashes_from_array(array[:3])


def test_wrong_arguments_are_refused() -> None:
    """A block size below 1, a parent that is no hash."""
    with pytest.raises(ValueError, match="block_size"):
        hash_blocks(TOKENS, 0)
    with pytest.raises(ValueError, match="parent"):
        hash_blocks(TOKENS, 8, parent=b"short")
