"""Replies to clients: detokenizer, tokenizer, scheduler -> ingress."""

from __future__ import annotations

from msgspec import field

from pagebus.bus.messages.field_types import NO_INTS, FinishReason, Int32Array
from pagebus.bus.messages.record import Record


class ReplyBatch(Record, frozen=True, kw_only=True):
    """New text for requests of one ingress: column i of every field belongs to (request_ids[i], choice_indexes[i]).

    ``num_output_tokens`` is the count after this delta and ``text_offsets`` the number of characters before it. Text
    that is made again begins with its first character, so the ingress can recognise and drop what was sent before.
    ``finish_reasons[i]`` is None until the one terminal delta. ``stop_reasons[i]`` is the stop string or end token id.

    If choices report tokens, ``token_counts[i]`` entries of ``token_ids`` and ``token_bits`` are new, and
    ``top_counts`` says how many entries of ``top_ids`` and ``top_bits`` belong to each token. A token without log
    probabilities has -1 in ``top_counts`` and 0 in ``token_bits``. Without such choices all of these are empty.
    ``token_texts`` holds the text of every id, ``token_bytes`` (hexadecimal) the bytes of ids that are no text alone.
    """

    request_ids: tuple[str, ...]
    texts: tuple[str, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    stop_reasons: tuple[str | int | None, ...]
    choice_indexes: Int32Array = NO_INTS
    num_output_tokens: Int32Array = NO_INTS
    num_prompt_tokens: Int32Array = NO_INTS
    num_cached_tokens: Int32Array = NO_INTS
    token_texts: dict[int, str] = field(default_factory=dict)
    token_bytes: dict[int, str] = field(default_factory=dict)
    token_counts: Int32Array = NO_INTS
    token_ids: Int32Array = NO_INTS
    token_bits: Int32Array = NO_INTS
    top_counts: Int32Array = NO_INTS
    top_ids: Int32Array = NO_INTS
    top_bits: Int32Array = NO_INTS
    text_offsets: Int32Array = NO_INTS
    length_counts: Int32Array = NO_INTS
    """How many entries of ``text_lengths`` belong to each choice: one per new token, or none if not requested."""
    text_lengths: Int32Array = NO_INTS
    """Characters of the delta that came with each token."""
    num_predicted: Int32Array = NO_INTS
    num_unpredicted: Int32Array = NO_INTS
    """How many tokens of each choice's prediction have occurred in its output so far, and how many have not. Both are
    empty where no choice has a prediction, and 0 for those without."""


class PromptReply(Record, frozen=True, kw_only=True):
    """What a client requested about its prompt; sent before the terminal reply of any choice.

    ``token_ids`` [P]. With log probabilities (``num_top`` is not None): ``token_bits`` and ``ranks`` [P - 1] of the
    tokens from the second on, ``top_ids`` and ``top_bits`` [(P - 1) * num_top]. The texts are as in ReplyBatch.
    With pooling there are ``pooled_bits`` [hidden size] alone, a float32 vector as its bits.
    ``token_offsets`` [2 * P], if requested and the prompt is a text: the first character of each token, and the one
    after its last.
    """

    request_id: str
    text: str
    num_top: int | None = None
    token_texts: dict[int, str] = field(default_factory=dict)
    token_bytes: dict[int, str] = field(default_factory=dict)
    token_ids: Int32Array = NO_INTS
    token_bits: Int32Array = NO_INTS
    ranks: Int32Array = NO_INTS
    top_ids: Int32Array = NO_INTS
    top_bits: Int32Array = NO_INTS
    pooled_bits: Int32Array = NO_INTS
    token_offsets: Int32Array = NO_INTS


class RequestFailed(Record, frozen=True, kw_only=True):
    """The one terminal message of a request that never ran or cannot continue. ``status`` is the HTTP status to answer.
    ``attempt``: the one that fails, while another continues; "": all fail."""

    request_id: str
    status: int
    error_type: str
    message: str
    param: str | None = None
    attempt: str = ""


class RequestTimed(Record, frozen=True, kw_only=True):
    """The times of a ``traced`` request that is over; 0: the stage was not reached.

    In this order: a tokenizer took it up, it was tokenized, it first entered a batch, it had its first token, and a
    step computed its last.
    """

    request_id: str
    taken_s: float = 0.0
    tokenized_s: float = 0.0
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    num_preemptions: int = 0
