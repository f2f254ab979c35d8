"""Drafters that know the answers, or never do, in place of the engine's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from pagebus.actors.executor.device.operations import LookUpDrafts
from pagebus.kernels.batch.draft_lookup import store_drafts_reference

Guess = Callable[[list[int], int], list[int]]
"""From a sequence's tokens and a number that many tokens to come."""


def drafter(guess: Guess) -> LookUpDrafts:
    """``guess`` as an operation, in plain Python."""

    def look_up(
        tokens: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor, slots: torch.Tensor, num_drafts: int,
        shortest: int, longest: int, vocab_size: int, out: torch.Tensor, predicted: torch.Tensor, first_predicted: int,
    ) -> None:  # fmt: skip
        known = [tokens[slot, : int(lengths[slot])].tolist() for slot in slots.tolist()]
        drafts = torch.tensor([guess(each, num_drafts) for each in known], dtype=torch.int32, device=tokens.device)
        store_drafts_reference(tokens, lengths, found, slots, drafts, vocab_size)
        out.copy_(found[slots.long()])

    return look_up


def oracle(texts: Sequence[list[int]], error: float = 0.0) -> Guess:
    """Knows the whole ``texts`` that there will be, and is wrong now and then."""
    rng = random.Random(0)

    def guess(known: list[int], count: int) -> list[int]:
        text = next((each for each in texts if each[: len(known)] == known), [])
        drafts = (text[len(known) :] + [0] * count)[:count]
        return [token + 1 if rng.random() < error else token for token in drafts]

    return guess


ADVERSARIES: dict[str, Guess] = {
    "wrong": lambda known, count: [(known[-1] * 7 + place + 1) % 290 for place in range(count)],
    "beyond the vocabulary": lambda known, count: [2**30, -5, 307][:count] + [9999] * (count - 3),
    "repeating": lambda known, count: [known[-1]] * count,
}
