"""Starts and ends of sequences: scheduler -> detokenizer."""

from __future__ import annotations

from pagebus.bus.messages.field_types import NO_INTS, FinishReason, Int32Array
from pagebus.bus.messages.record import Record
from pagebus.bus.messages.sampling import SamplingParams


class SequenceStarted(Record, frozen=True, kw_only=True):
    """Tells a detokenizer how to turn the tokens of ``sequence_id`` into text and where the text goes.

    Sent before the first step that computes the sequence. Choices of a beam search are sent when the search is over,
    because beams change their past until then. ``prompt_tail`` holds the last prompt tokens (at most
    ``PROMPT_TAIL_TOKENS``), the context that incremental detokenization needs. ``sampling`` is the request's own,
    without what only executors need. ``max_tokens`` is the most that the sequence can have where it runs.

    Sent again if the text must be made again: its detokenizer or the scheduler was replaced, or a client has come to
    another ingress. ``output_token_ids`` are all tokens so far (the next result continues them), and ``output_end`` is
    how they ended (see ``StepResult.ends``). The other ``output_`` columns hold their known log probabilities, as in
    :class:`ReplyBatch`.
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
    """The whole prompt, if the client gets it; only in the request's first sequence, otherwise empty."""
    output_end: int = 0
    output_token_ids: Int32Array = NO_INTS
    output_bits: Int32Array = NO_INTS
    output_top_counts: Int32Array = NO_INTS
    output_top_ids: Int32Array = NO_INTS
    output_top_bits: Int32Array = NO_INTS
    pooled_from: int | None = None
    """The client gets the mean of the prompt's final hidden states from this token on; None: it does not."""
    others: tuple[str, ...] = ()
    """Other ingresses that get the same replies."""
    pooled_until: int | None = None
    """The mean ends before this token; None: with the prompt."""
    prediction_token_ids: Int32Array = NO_INTS
    """Tokens of the expected output."""
    attempts: tuple[str, ...] = ()
    """The attempts of the clients at ``ingress`` and ``others``; empty: all are ""."""


PROMPT_TAIL_TOKENS = 6


class SequenceEnded(Record, frozen=True, kw_only=True):
    """The scheduler ends a sequence itself. ``abort``: drop its state silently. ``error``: send a terminal reply."""

    sequence_id: int
    reason: FinishReason
    message: str = ""


class SchedulerLeads(Record, frozen=True, kw_only=True):
    """The first message of a new scheduler to a detokenizer: all sequences of the old one are void. Those that continue
    are started again under new ids, once every token that the detokenizer may have seen is known."""

    epoch: int
