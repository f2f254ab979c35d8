"""Starts and ends of sequences: scheduler -> detokenizer."""

from __future__ import annotations

from pagebus.bus.messages.field_types import NO_INTS, FinishReason, Int32Array
from pagebus.bus.messages.record import Record
from pagebus.bus.messages.sampling import SamplingParams


class SequenceStarted(Record, frozen=True, kw_only=True):
    """Tells a detokenizer how to turn the tokens of ``sequence_id`` into text and where the text goes.

    Sent before the first step that computes the sequence; for the choices of a beam search, which change their past as
    long as it goes on, when it is over. ``prompt_tail`` holds the last prompt tokens (at most
    ``PROMPT_TAIL_TOKENS``), the context that incremental detokenization needs. ``sampling`` is the request's own, but
    for what only executors need; ``max_tokens`` beside it is how many tokens the sequence can have where it runs.

    Sent again when the text has to be made anew, because its detokenizer or the scheduler was replaced or because its
    client is at another ingress now, or one more is. ``output_token_ids`` are all tokens that there are then (the
    result of a step adds the next one), and ``output_end`` is how they ended (see ``StepResult.ends``). What is known
    of their log probabilities is in the other ``output_`` columns, which are those of :class:`ReplyBatch`.
    """

    request_id: str
    sequence_id: int
    choice_index: int
    ingress: str
    num_prompt_tokens: int
    num_cached_tokens: int
    max_tokens: int
    sampling: SamplingParams
    arrived_s: float = 0.0
    prompt_tail: Int32Array = NO_INTS
    prompt_token_ids: Int32Array = NO_INTS
    """The whole prompt, if the client is to be told of it (by the request's first sequence only); else empty."""
    output_end: int = 0
    output_token_ids: Int32Array = NO_INTS
    output_bits: Int32Array = NO_INTS
    output_top_counts: Int32Array = NO_INTS
    output_top_ids: Int32Array = NO_INTS
    output_top_bits: Int32Array = NO_INTS
    pooled_from: int | None = None
    """The client is to be told the mean of the prompt's final hidden states from this token on; None: it is not."""
    others: tuple[str, ...] = ()
    """Further ingresses that are told the same."""
    pooled_until: int | None = None
    """The mean ends before this token; None: with the prompt."""
    prediction_token_ids: Int32Array = NO_INTS
    """What the output is expected to resemble."""


PROMPT_TAIL_TOKENS = 6


class SequenceEnded(Record, frozen=True, kw_only=True):
    """The scheduler ends a sequence itself. ``abort``: drop its state silently. ``error``: send a terminal reply."""

    sequence_id: int
    reason: FinishReason
    message: str = ""


class SchedulerLeads(Record, frozen=True, kw_only=True):
    """The first message of a new scheduler to a detokenizer: all sequences of the old one are void. Those that go on
    are started anew, under new ids, once every token that the detokenizer can have seen is known."""

    epoch: int
