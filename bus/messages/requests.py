"""Requests of clients: ingress -> tokenizer -> scheduler."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from pagebus.bus.messages.field_types import NO_INTS, Int32Array, JsonValue
from pagebus.bus.messages.record import Record
from pagebus.bus.messages.sampling import SamplingParams

MOST_PREDICTION_TOKENS = 8192
"""Only the first tokens of a longer prediction count."""


class AdapterSource(Record, frozen=True, kw_only=True):
    """An adapter of low rank: where executors find it, and the ``digest`` of what they must find there.

    The digest alone is its identity. ``name`` is what clients call it.
    """

    name: str
    path: str
    digest: str


class GenerateRequest(Record, frozen=True, kw_only=True):
    """One prompt to continue. Exactly one of ``prompt``, ``prompt_token_ids`` (non-empty) and ``messages`` is given."""

    request_id: str
    ingress: str
    sampling: SamplingParams
    prompt: str | None = None
    messages: tuple[JsonValue, ...] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, JsonValue] = field(default_factory=dict)
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    arrived_s: float = 0.0
    prompt_token_ids: Int32Array = NO_INTS
    is_job: bool = False
    """Queued batch work: it follows all interactive requests."""
    attempt: str = ""
    """Distinguishes a client's attempts at this request. A new attempt joins the request if it is under way."""
    chat_template: str | None = None
    """The client's own template, in place of the model's."""
    tools: tuple[JsonValue, ...] = ()
    """For the template: functions that the model may call."""
    documents: tuple[JsonValue, ...] = ()
    """For the template: what the model may rely on."""
    tokens_only: bool = False
    """Nothing is generated: the answer is a PromptReply of the tokenizer, with the prompt's tokens."""
    client: str = ""
    """Name of the API key it came with; empty: none is needed. A client's requests share its part by ``weight``."""
    weight: float = 1.0
    traced: bool = False
    """The ingress wants the times of its stages (:class:`RequestTimed`)."""
    truncation_side: Literal["left", "right"] = "left"
    """Where ``truncate_prompt_tokens`` takes tokens away."""
    return_token_offsets: bool = False
    """With ``tokens_only``: the answer says where in the prompt's text its tokens are."""
    shared: bool = False
    """Readers at other ingresses continue to read. Otherwise a new ``attempt`` takes the request away from them."""
    second_text: str | None = None
    """The second text of a pair with ``prompt``: the tokenizer puts its separator between them."""
    prediction: str | None = None
    """A text that the output is expected to resemble."""
    adapter: AdapterSource | None = None
    """The adapter to compute with; None: the model alone."""


class TokenizedRequest(Record, frozen=True, kw_only=True):
    """A request the scheduler can admit: token ids inside the vocabulary, prompt shorter than ``max_model_len``.

    ``block_hashes`` [num_full_blocks * 4] holds one 128-bit chained hash per full block of the prompt; without prefix
    caching there are none.
    ``sampling.max_tokens`` is resolved (never None) and fits the context.
    """

    request_id: str
    ingress: str
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrived_s: float = 0.0
    tokenized_s: float = 0.0
    prompt_token_ids: Int32Array = NO_INTS
    block_hashes: Int32Array = NO_INTS
    is_job: bool = False
    attempt: str = ""
    taken_s: float = 0.0
    """When a tokenizer took it up; 0: not known."""
    client: str = ""
    weight: float = 1.0
    """The client's weight, relative to other clients that have work."""
    traced: bool = False
    asked: int = 0
    """Place of this attempt among all requests, in order of arrival; 0: unknown."""
    shared: bool = False
    prediction_token_ids: Int32Array = NO_INTS
    """Tokens of the expected output, at most ``MOST_PREDICTION_TOKENS``."""
    adapter: AdapterSource | None = None


class ResponseQueued(Record, frozen=True, kw_only=True):
    """A response of ``/v1/responses`` that is computed whether or not its client waits. Its stored record has all the
    rest. ``owner``: the name of its API key."""

    response_id: str
    owner: str = ""
