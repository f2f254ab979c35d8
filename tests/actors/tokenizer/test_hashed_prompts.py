"""Hashes of prompts that begin alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagebus.actors.model.block_hash import hash_blocks, hashes_from_array
from pagebus.actors.tokenizer import hashed_prompts
from pagebus.actors.tokenizer.hashed_prompts import PIECE_BLOCKS, HashedPrompts
from pagebus.bus.messages import Int32Array

SIZE = 4
PIECE = SIZE * PIECE_BLOCKS
TOKENS = np.random.default_rng(0).integers(0, 1000, 5 * PIECE + 9, np.int32)


def changed(at: int) -> Int32Array:
    """The same prompt with another token there."""
    tokens = TOKENS.copy()
    tokens[at] += 1
    return tokens


PROMPTS = [TOKENS, TOKENS[: PIECE + 5], TOKENS[:PIECE], TOKENS[:3], TOKENS[:0], np.tile(TOKENS[:PIECE], 4)]
PROMPTS += [changed(at) for at in (0, PIECE - 1, PIECE, 3 * PIECE + 7, 5 * PIECE)]


def test_a_prompt_has_the_same_hashes_whatever_was_hashed_before() -> None:
    """Prompts that are the beginning of others, differ at one token, repeat themselves, or have a salt or adapter."""
    prompts = HashedPrompts(SIZE)
    cases = [(tokens, *of) for tokens in PROMPTS for of in ((None, ""), ("salt", ""), (None, "ab" * 16), ("", ""))]

    def check(case: tuple[Int32Array, str | None, str]) -> None:
        tokens, salt, adapter = case
        found = hashes_from_array(prompts.hashes(tokens, salt, adapter))
        assert found == hash_blocks(tokens, SIZE, salt=salt, adapter=adapter)

    for case in cases + cases[::-1]:
        check(case)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(check, cases * 20))


def test_only_what_is_new_of_a_prompt_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the piece on that differs, and to the end."""
    hashed = list[int]()

    def counting(ids: Int32Array, size: int, *, parent: bytes) -> list[bytes]:
        hashed.append(len(ids))
        return hash_blocks(ids, size, parent=parent)

    monkeypatch.setattr(hashed_prompts, "hash_blocks", counting)
    prompts = HashedPrompts(SIZE)
    for tokens in (TOKENS, TOKENS, changed(3 * PIECE + 7), changed(3 * PIECE + 7)):
        prompts.hashes(tokens, None, "")
    assert hashed == [len(TOKENS), 9, 2 * PIECE + 9, 9]


def test_what_was_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is remembered than is allowed, and not less: the other prompt's piece is still known."""
    monkeypatch.setattr(hashed_prompts, "MOST_TOKENS", 6 * PIECE)
    prompts = HashedPrompts(SIZE)
    other = TOKENS[7 : 7 + PIECE]
    for tokens in (other, TOKENS[: 4 * PIECE], other, changed(0)):
        prompts.hashes(tokens, None, "")
        assert len(prompts) <= 6
    assert len(prompts) == 6
    monkeypatch.setattr(hashed_prompts, "hash_blocks", lambda ids, *_, **__: [] if not len(ids) else None)
    assert hashes_from_array(prompts.hashes(other, None, "")) == hash_blocks(other, SIZE)
