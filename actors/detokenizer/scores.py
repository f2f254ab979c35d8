"""Tokens and log probabilities for clients that asked: what a step's result says, and what the replies will say."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pagebus.actors.detokenizer.text import Decoder
from pagebus.bus.messages import Int32Array, PromptReply, SequenceStarted, StepResult

NO_SCORE = -1
"""The ``top_counts`` of a token without log probabilities."""


@dataclass(frozen=True, slots=True)
class Score:
    """A token's log probability (its bits), and the most likely tokens in its place, with theirs."""

    bits: int
    top_ids: Int32Array
    top_bits: Int32Array


def row_scores(result: StepResult, wanted: Container[int]) -> dict[int, Score]:
    """The scores of the ``wanted`` rows of a result. Rows of beams have scores too, which are skipped. Malformed
    columns raise ValueError."""
    if not len(result.logprob_rows) == len(result.logprob_bits) == len(result.top_counts):
        raise ValueError("the log probability columns of a result differ in length")
    scores = _scores(result.logprob_bits, result.top_counts, result.top_ids, result.top_bits)
    return {row: score for row, score in zip(result.logprob_rows.tolist(), scores, strict=True) if row in wanted}


def output_scores(started: SequenceStarted) -> list[Score]:
    """The scores of the first tokens that a sequence brings along."""
    return list(
        _scores(started.output_bits, started.output_top_counts, started.output_top_ids, started.output_top_bits)
    )


def _scores(bits: Int32Array, counts: Int32Array, top_ids: Int32Array, top_bits: Int32Array) -> Iterator[Score]:
    ends = np.cumsum(counts)
    for own, start, end in zip(bits.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        yield Score(own, top_ids[start:end], top_bits[start:end])


@dataclass(slots=True)
class UnsentTokens:
    """Tokens of one sequence that have not been sent."""

    ids: list[int] = field(default_factory=list)
    scores: list[Score | None] = field(default_factory=list)


class TokenColumns:
    """Builds the token columns of a reply batch, choice by choice."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._ids: list[int] = []
        self._bits: list[int] = []
        self._top_counts: list[int] = []
        self._top_ids: list[Int32Array] = []
        self._top_bits: list[Int32Array] = []

    def add(self, unsent: UnsentTokens | None) -> None:
        """The next choice; takes what is unsent."""
        if unsent is None:
            self._counts.append(0)
            return
        self._counts.append(len(unsent.ids))
        self._ids += unsent.ids
        for score in unsent.scores:
            self._bits.append(0 if score is None else score.bits)
            self._top_counts.append(NO_SCORE if score is None else len(score.top_ids))
            if score is not None:
                self._top_ids.append(score.top_ids)
                self._top_bits.append(score.top_bits)
        unsent.ids, unsent.scores = [], []

    def fields(self, decoder: Decoder) -> dict[str, Int32Array | dict[int, str]]:
        """Fields of a :class:`ReplyBatch`; none if no choice has tokens to tell."""
        if not self._ids:
            return {}
        top_ids = _joined(self._top_ids)
        texts, data = token_texts(decoder, [*self._ids, *top_ids.tolist()])
        return {
            "token_counts": np.array(self._counts, np.int32),
            "token_ids": np.array(self._ids, np.int32),
            "token_bits": np.array(self._bits, np.int32),
            "top_counts": np.array(self._top_counts, np.int32),
            "top_ids": top_ids,
            "top_bits": _joined(self._top_bits),
            "token_texts": texts,
            "token_bytes": data,
        }


class PromptScores:
    """Collects the log probabilities of one prompt of P tokens, chunk by chunk, until all are there.

    Chunks of one stream come in order. After a preemption or the loss of an executor the prompt is computed anew, and
    what is known already comes again: only what goes on where the last chunk ended counts.
    """

    def __init__(self, started: SequenceStarted) -> None:
        self._started = started
        self._next = 1 if started.sampling.prompt_logprobs is not None else len(started.prompt_token_ids)
        self._bits: list[Int32Array] = []
        self._ranks: list[Int32Array] = []
        self._top_ids: list[Int32Array] = []
        self._top_bits: list[Int32Array] = []
        self._num_top = 0

    @property
    def complete(self) -> bool:
        return self._next >= len(self._started.prompt_token_ids)

    def add(self, start: int, num_top: int, bits: Int32Array, ranks: Int32Array, *tops: Int32Array) -> None:
        """Positions from ``start`` on: ``bits`` and ``ranks`` [n]; ids and bits of the tops [n * num_top]."""
        known = self._next - start
        if not 0 <= known < len(bits):
            return
        self._num_top = num_top
        self._next = start + len(bits)
        self._bits.append(bits[known:])
        self._ranks.append(ranks[known:])
        self._top_ids.append(tops[0][known * num_top :])
        self._top_bits.append(tops[1][known * num_top :])

    def reply(self, decoder: Decoder) -> PromptReply:
        """The message about the whole prompt."""
        started, top_ids = self._started, _joined(self._top_ids)
        ids = started.prompt_token_ids
        texts, data = token_texts(decoder, [*ids.tolist(), *top_ids.tolist()])
        return PromptReply(
            request_id=started.request_id,
            text=_text(decoder, started),
            num_top=None if started.sampling.prompt_logprobs is None else self._num_top,
            token_texts=texts,
            token_bytes=data,
            token_ids=ids,
            token_bits=_joined(self._bits),
            ranks=_joined(self._ranks),
            top_ids=top_ids,
            top_bits=_joined(self._top_bits),
        )


def add_prompt_parts(result: StepResult, prompt_of: Callable[[int], PromptScores | None]) -> list[int]:
    """Hand each part of a prompt in ``result`` to its collector; returns the sequence ids that got something."""
    first = first_top = 0
    touched = []
    parts = (result.prompt_sequence_ids, result.prompt_starts, result.prompt_lengths, result.prompt_top_counts)
    for sequence_id, start, length, num_top in zip(*(part.tolist() for part in parts), strict=True):
        end, end_top = first + length, first_top + length * num_top
        scores = prompt_of(sequence_id)
        if scores is not None:
            rows, tops = slice(first, end), slice(first_top, end_top)
            scores.add(
                start, num_top, result.prompt_bits[rows], result.prompt_ranks[rows],
                result.prompt_top_ids[tops], result.prompt_top_bits[tops],
            )  # fmt: skip
            touched.append(sequence_id)
        first, first_top = end, end_top
    return touched


def token_texts(decoder: Decoder, ids: Iterable[int]) -> tuple[dict[int, str], dict[int, str]]:
    """Text of each token alone, and the bytes (hexadecimal) of those whose text is not all of them."""
    texts: dict[int, str] = {}
    data: dict[int, str] = {}
    for token_id in set(ids):
        text, exact = decoder.token(token_id)
        texts[token_id] = text
        if exact is not None:
            data[token_id] = exact.hex()
    return texts, data


def _text(decoder: Decoder, started: SequenceStarted) -> str:
    """The prompt as text; with special tokens for a client that wants to see all of it."""
    skip = started.sampling.skip_special_tokens and not started.sampling.return_prompt_text
    state = decoder.begin((), skip_special=skip, spaces=started.sampling.spaces_between_special_tokens)
    pieces = [decoder.push([state], [token_id])[0] for token_id in started.prompt_token_ids.tolist()]
    return "".join(pieces) + decoder.finish(state)


def _joined(arrays: list[Int32Array]) -> Int32Array:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)
