"""The columns of a :class:`pagebus.bus.messages.ReplyBatch`, by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagebus.bus.messages import ReplyBatch
from pagebus.web.calls.answer_details import Token, read_tokens

NOT_BEFORE = 2**31
"""The text offset of a reply that has none: nothing of it can have arrived before."""


def columns_of(batch: ReplyBatch) -> tuple[Sequence[Any], ...]:
    """The columns of a batch by row, without tokens."""
    return (
        batch.request_ids,
        batch.choice_indexes.tolist(),
        batch.texts,
        batch.num_output_tokens.tolist(),
        batch.finish_reasons,
        batch.stop_reasons,
        batch.num_prompt_tokens.tolist(),
        batch.num_cached_tokens.tolist(),
        batch.text_offsets.tolist() or [NOT_BEFORE] * len(batch.texts),
    )


def details_of(
    batch: ReplyBatch,
) -> tuple[dict[int, list[Token]], dict[int, list[int]], dict[int, tuple[int, int]]]:
    """What only some rows have, by row: the tokens that are shown, their lengths, and what was predicted."""
    return (
        _shown_tokens(batch) if len(batch.token_counts) else {},
        _lengths(batch) if len(batch.length_counts) else {},
        dict(enumerate(_predicted(batch))) if len(batch.num_predicted) else {},
    )


def _lengths(batch: ReplyBatch) -> dict[int, list[int]]:
    """Characters per token, by row."""
    lengths, told, start = batch.text_lengths.tolist(), {}, 0
    for row, count in enumerate(batch.length_counts.tolist()):
        if count:
            told[row] = lengths[start : start + count]
            start += count
    return told


def _predicted(batch: ReplyBatch) -> list[tuple[int, int]]:
    """By row, how many tokens of its prediction have occurred, and how many have not."""
    return list(zip(batch.num_predicted.tolist(), batch.num_unpredicted.tolist(), strict=True))


def _shown_tokens(batch: ReplyBatch) -> dict[int, list[Token]]:
    """Tokens of a batch, by row."""
    shown_tokens: dict[int, list[Token]] = {}
    tokens = read_tokens(batch.token_ids, batch.token_bits, batch.top_counts, (batch.top_ids, batch.top_bits))
    start = 0
    for row, count in enumerate(batch.token_counts.tolist()):
        if count:
            shown_tokens[row] = tokens[start : start + count]
            start += count
    return shown_tokens
