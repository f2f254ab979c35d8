"""A model without weights: the next token is a function of the chained hash of all tokens before it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pagebus.actors.scheduler.beam_search import BeamSearch
from pagebus.bus.messages import SamplingParams

VOCAB = 40
MULTIPLIER, STEP = 6364136223846793005, 1442695040888963407
CANDIDATE_STEPS = np.array([((token + 1000) * STEP + 1) % 2**64 for token in range(VOCAB)], np.uint64)


def chain(parent: int, token: int) -> int:
    """Hash of a prefix and one more token."""
    mixed = (parent * MULTIPLIER + token * STEP + 1) % 2**64
    return mixed ^ (mixed >> 29)


def next_token(prefix: int) -> int:
    return (prefix >> 20) % VOCAB


PAST: dict[int, tuple[int, int]] = {}
"""Of every hash of a prefix: the hash without its last token, and that token. A beam's past is read from here."""


def remember(parent: int, token: int) -> int:
    """:func:`chain`, noted in ``PAST``."""
    prefix = chain(parent, token)
    PAST[prefix] = parent, token
    return prefix


def candidates(prefix: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The most likely next tokens [count] and their log probabilities' bits; all of them are different."""
    mixed = np.uint64(prefix * MULTIPLIER % 2**64) + CANDIDATE_STEPS  # as chain(prefix, token + 1000), of all tokens
    logits = (mixed ^ (mixed >> np.uint64(29))) % np.uint64(10007) / 2000 + np.arange(VOCAB) / 10**6
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    top = np.argsort(-logprobs, kind="stable")[:count].astype(np.int32)
    return top, logprobs[top].view(np.int32)


def expected_beams(
    prompt: Iterable[int], max_tokens: int, end_ids: Iterable[int], sampling: SamplingParams
) -> list[list[int]]:
    """The choices of a beam search over the fake model, run alone."""
    search = BeamSearch(
        sampling.beam_width, max_tokens, tuple(end_ids), min_tokens=sampling.min_tokens,
        length_penalty=sampling.length_penalty, early_stopping=sampling.early_stopping,
    )  # fmt: skip
    start = 0
    for token in prompt:
        start = chain(start, token)
    while not search.done:
        rows = []
        for beam in search.running().tolist():
            prefix = start
            for token in beam:
                prefix = chain(prefix, token)
            rows.append(candidates(prefix, search.num_candidates))
        search.choose(np.array([row[0] for row in rows]), np.array([row[1] for row in rows]))
    return [each.tokens.tolist() for each in search.best(sampling.n)]


def expected_tokens(
    prompt: Iterable[int], max_tokens: int, end_ids: Iterable[int] = (), min_tokens: int = 0
) -> list[int]:
    """What the fake model generates, run alone."""
    prefix, output, ends = 0, [], set(end_ids)
    for token in prompt:
        prefix = chain(prefix, token)
    while len(output) < max_tokens:
        output.append(next_token(prefix))
        prefix = chain(prefix, output[-1])
        if output[-1] in ends and len(output) > min_tokens:
            break
    return output
