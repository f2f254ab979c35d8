"""The state of one sequence in the detokenizer, and the replies made of several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pagebus.actors.detokenizer.pooling import PooledPrompt
from pagebus.actors.detokenizer.prediction import PredictionMatcher
from pagebus.actors.detokenizer.repetition import RepetitionDetector
from pagebus.actors.detokenizer.scores import PromptScores, TokenColumns, UnsentTokens
from pagebus.actors.detokenizer.stops import StopMatcher
from pagebus.actors.detokenizer.text import Decoder, TextState
from pagebus.actors.detokenizer.text_lengths import TextLengths
from pagebus.bus.messages import END_STOP, FinishReason, Int32Array, ReplyBatch, SequenceStarted


@dataclass(slots=True)
class SequenceState:
    """One sequence: what it is, how far its text is, and what has not been sent yet."""

    started: SequenceStarted
    text: TextState
    stops: StopMatcher | None
    num_tokens: int = 0
    unsent: list[str] = field(default_factory=list)
    num_sent: int = 0
    """Characters of text that have been sent."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    tokens: UnsentTokens | None = None
    """For clients that want tokens or log probabilities."""
    prompt: PromptScores | PooledPrompt | None = None
    """While something about the prompt is to be sent."""
    repetition: RepetitionDetector | None = None
    prediction: PredictionMatcher | None = None
    num_told: int = 0
    """Tokens of which the lengths have been sent, for clients that want them."""

    @property
    def ingresses(self) -> tuple[str, ...]:
        """Where its text goes."""
        return self.started.ingress, *self.started.others

    def prompt_told(self) -> None:
        """All that the client wants to know about the prompt has been sent."""
        self.prompt = None

    def finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        """End its text."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def is_silent(self, end: int) -> bool:
        """Whether the token that ended it is no text: it is only for a client that wants to see what stopped it.

        Nothing is text for a client that wants none.
        """
        sampling = self.started.sampling
        return not sampling.detokenize or (end == END_STOP and not sampling.include_stop_str_in_output)


def _predicted(states: Sequence[SequenceState]) -> dict[str, Int32Array]:
    """Fields of a :class:`ReplyBatch`; none if no choice has a prediction."""
    if all(state.prediction is None for state in states):
        return {}
    found = [(0, 0) if each is None else (each.num_predicted, each.num_unpredicted)
             for each in (state.prediction for state in states)]  # fmt: skip
    table = np.array(found, np.int32)
    return {"num_predicted": table[:, 0].copy(), "num_unpredicted": table[:, 1].copy()}


def reply_batch(states: Iterable[SequenceState], decoder: Decoder) -> ReplyBatch:
    """The rows of one ingress; takes the unsent text."""
    rows = list(states)
    texts, offsets = [], []
    columns, lengths = TokenColumns(), TextLengths()
    for row, state in enumerate(rows):
        columns.add(state.tokens)
        if state.started.sampling.return_text_lengths:
            lengths.add(row, state.unsent, state.num_tokens - state.num_told)
            state.num_told = state.num_tokens
        texts.append("".join(state.unsent))
        state.unsent.clear()
        offsets.append(state.num_sent)
        state.num_sent += len(texts[-1])
    return ReplyBatch(
        request_ids=tuple(state.started.request_id for state in rows),
        texts=tuple(texts),
        finish_reasons=tuple(state.finish_reason for state in rows),
        stop_reasons=tuple(state.stop_reason for state in rows),
        choice_indexes=np.array([state.started.choice_index for state in rows], np.int32),
        num_output_tokens=np.array([state.num_tokens for state in rows], np.int32),
        num_prompt_tokens=np.array([state.started.num_prompt_tokens for state in rows], np.int32),
        num_cached_tokens=np.array([state.started.num_cached_tokens for state in rows], np.int32),
        text_offsets=np.array(offsets, np.int32),
        **_predicted(rows),  # type: ignore[arg-type]
        **lengths.fields(len(rows)),  # type: ignore[arg-type]
        **columns.fields(decoder),  # type: ignore[arg-type]
    )
