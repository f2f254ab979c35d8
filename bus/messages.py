"""Every message that crosses a process boundary: one frozen, slotted dataclass per event.

Rules: a field is a JSON scalar, an optional, a tuple, a dict with string or integer keys, another dataclass of this
file, or an :data:`Int32Array`. Arrays travel as raw little-endian int32 beside the JSON header (see :mod:`bus.codec`);
everything else travels in the header. New fields go last, with defaults, so that two versions can read each other.

The life of a request, with the stream that carries each message (:mod:`bus.streams`):

==========================  =====================  ==========================================
message                     stream                 from -> to
==========================  =====================  ==========================================
GenerateRequest             requests (work)        ingress -> any tokenizer
TokenizedRequest            tokenized (work)       tokenizer -> scheduler
AbortRequest, StopSequence, control (work)         ingress, detokenizer -> scheduler
RequestsDone, CancelRequest,
StateRequested,
BlockRequested
SequenceStarted/Ended,      sequences:<detok>      scheduler -> that detokenizer
SchedulerLeads
StepPlan                    steps:<replica>        scheduler -> every rank of the replica
StepResult, ReplicaFenced   results:<replica>      executor rank 0 -> scheduler, detokenizers
ReplyBatch, PromptReply,    replies:<ingress>      detokenizer, tokenizer, scheduler -> ingress
RequestFailed,
SchedulerState, BlockState
SequencesNamed,             journal                scheduler -> its successor
RequestMoved, Checkpoint
Job, BatchQueued            {name}:jobs (work)     anybody, ingress -> any jobs actor
JobResult                   {name}:results         jobs actor -> whoever sent the job
==========================  =====================  ==========================================
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bus.sampling import SamplingParams as SamplingParams
from bus.sampling import StructuredOutput as StructuredOutput

Int32Array = NDArray[np.int32]
JsonValue = object
"""Free JSON (chat messages): checked where it enters, never interpreted by the bus."""

FinishReason = Literal["stop", "length", "abort", "error"]


_NO_INTS: Int32Array = np.empty(0, np.int32)


def _no_ints() -> Int32Array:
    return _NO_INTS  # of length 0: there is nothing in it that anybody could change


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
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
    prompt_token_ids: Int32Array = field(default_factory=_no_ints)
    is_job: bool = False
    """Queued batch work: it stands behind all interactive requests."""
    attempt: str = ""
    """Tells one time that a client asks for this request from another. One that differs joins what is under way."""
    chat_template: str | None = None
    """A template of the client's own, in place of the model's."""
    tools: tuple[JsonValue, ...] = ()
    """For the template: functions that the model may call."""
    documents: tuple[JsonValue, ...] = ()
    """For the template: what the model may rely on."""
    tokens_only: bool = False
    """Nothing is to be generated: the answer is a PromptReply of the tokenizer, with the prompt's tokens."""
    client: str = ""
    """Name of the API key it came with; empty: there are none. Requests of one client share what is its by weight."""
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRequest:
    """A request the scheduler can admit: token ids inside the vocabulary, prompt shorter than ``max_model_len``.

    ``block_hashes`` [num_full_blocks * 4] holds one 128-bit chained hash per full block of the prompt.
    ``sampling.max_tokens`` is resolved (never None) and fits the context.
    """

    request_id: str
    ingress: str
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrived_s: float = 0.0
    tokenized_s: float = 0.0
    prompt_token_ids: Int32Array = field(default_factory=_no_ints)
    block_hashes: Int32Array = field(default_factory=_no_ints)
    is_job: bool = False
    attempt: str = ""
    taken_s: float = 0.0
    """When a tokenizer took it up; 0: not known."""
    client: str = ""
    weight: float = 1.0
    """Of its client's share, beside others that have work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """The client of ``request_id`` is gone: free everything it holds, send nothing more.

    ``attempt`` is the one that the client left: a request that was asked for again since goes on.
    ``may_return``: the client said that it may come back for the rest; the request goes on for a while.
    """

    request_id: str
    reason: str = "client disconnected"
    attempt: str = ""
    may_return: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsDone:
    """The answers of these requests, to the end, are with their clients: nothing needs to be kept of them."""

    request_ids: tuple[str, ...]
    attempts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSequence:
    """The detokenizer found a stop string and has already sent the terminal reply: stop computing this sequence."""

    request_id: str
    sequence_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStarted:
    """Tells a detokenizer how to turn the tokens of ``sequence_id`` into text and where the text goes.

    Sent before the first step that computes the sequence; for the choices of a beam search, which change their past as
    long as it goes on, when it is over. ``prompt_tail`` holds the last prompt tokens (at most
    ``PROMPT_TAIL_TOKENS``), the context that incremental detokenization needs.

    Sent again when the text has to be made anew, because its detokenizer or the scheduler was replaced or because its
    client is at another ingress now. ``output_token_ids`` are all tokens that there are then (the result of a step adds
    the next one), and ``output_end`` is how they ended (see ``StepResult.ends``). What is known of their log
    probabilities is in the other ``output_`` columns, which are those of :class:`ReplyBatch`.
    """

    request_id: str
    sequence_id: int
    choice_index: int
    ingress: str
    num_prompt_tokens: int
    num_cached_tokens: int
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    arrived_s: float = 0.0
    prompt_tail: Int32Array = field(default_factory=_no_ints)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    prompt_token_ids: Int32Array = field(default_factory=_no_ints)
    """The whole prompt, if the client is to be told of it (by the request's first sequence only); else empty."""
    output_end: int = 0
    output_token_ids: Int32Array = field(default_factory=_no_ints)
    output_bits: Int32Array = field(default_factory=_no_ints)
    output_top_counts: Int32Array = field(default_factory=_no_ints)
    output_top_ids: Int32Array = field(default_factory=_no_ints)
    output_top_bits: Int32Array = field(default_factory=_no_ints)
    pooled_from: int | None = None
    """The client is to be told the mean of the prompt's final hidden states from this token on; None: it is not."""


PROMPT_TAIL_TOKENS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnded:
    """The scheduler ends a sequence itself. ``abort``: drop its state silently. ``error``: send a terminal reply."""

    sequence_id: int
    reason: FinishReason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLeads:
    """The first message of a new scheduler to a detokenizer: all sequences of the old one are void. Those that go on
    are started anew, under new ids, once every token that the detokenizer can have seen is known."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that enters the persistent batch at ``slot``; its arrays lie in the step plan, in the same order.

    ``num_prompt_tokens`` counts the client's prompt; after a preemption the token array also holds tokens generated
    before, so ``num_tokens`` may be larger. ``num_computed_tokens`` of them are already in the KV cache (prefix hit, or
    swapped in); they need not fill their last block.
    ``max_total_tokens`` is the length (prompt + output) at which the sequence ends. ``end_token_ids`` end it earlier,
    from the ``min_tokens``-th output token on (before that they are never sampled).
    """

    sequence_id: int
    slot: int
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_blocks: int
    max_total_tokens: int
    min_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    end_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Only positions that are computed are reported: tokens found in the cache have no log probability."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: str = ""
    """What the output is kept to, see ``SamplingParams.grammar``. The tokens generated before are part of it."""
    pooled_from: int | None = None
    """The prompt's final hidden states from this token on are reported, as far as they are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass, as a delta to the executor's persistent batch. Applied strictly in this order.

    1. ``freed_slots`` [k]: these slots are empty now.
    2. ``new_sequences``: fill slots. ``new_token_ids`` concatenates their tokens, ``new_block_ids`` their block tables.
    3. ``cut_slots`` / ``cut_blocks`` [b]: keep that many blocks of the slot's table. ``chosen_slots`` and
       ``chosen_tokens`` [t]: the slot's last token is this one, whatever was sampled. (So a beam takes over another's
       past; what the slot's earlier tokens were is not said, because nothing reads them.)
       Then ``appended_slots`` / ``appended_blocks`` [m]: append one block to the slot's block table, in order.
    4. ``copy_sources`` / ``copy_targets`` [c]: device block copies (copy-on-write), before the forward pass.
    5. The pass: ``slots`` [r] with ``num_scheduled`` [r] tokens each, from the slot's computed count on. A row whose
       computed count reaches its token count samples one token, which is stored on the device as the slot's next token
       and returned. ``decode rows come first``: the first ``num_decodes`` rows have one scheduled token that is the
       slot's last token.

    Before all of these, the blocks between the two tiers are copied: ``swap_out_blocks`` [o] (device) to
    ``swap_out_hosts`` [o] (host), in order; then ``swap_in_hosts`` [i] to ``swap_in_blocks`` [i], in order. As if
    nothing overlapped: a swap-out reads what all earlier steps have left in its device block, before this plan writes
    there; a swap-in may read a host block that the same plan has written, is complete before any step from this one on
    reads its device block, and leaves its host block free to be written by the next plan. The executor may run copies
    beside steps as long as nobody can see the difference.

    A plan with no rows is legal (it only frees or copies). ``step`` counts plans of this replica in this scheduler
    epoch, from 1, and equals the index of the entry's explicit stream id.

    ``executor_epoch`` is the lease epoch of the executor that the plan is for (0: any). An executor passes over plans
    for another: they were written before the scheduler knew that it had taken that one's place.
    """

    step: int
    planned_s: float
    num_decodes: int
    new_sequences: tuple[NewSequence, ...] = ()
    freed_slots: Int32Array = field(default_factory=_no_ints)
    new_token_ids: Int32Array = field(default_factory=_no_ints)
    new_block_ids: Int32Array = field(default_factory=_no_ints)
    appended_slots: Int32Array = field(default_factory=_no_ints)
    appended_blocks: Int32Array = field(default_factory=_no_ints)
    copy_sources: Int32Array = field(default_factory=_no_ints)
    copy_targets: Int32Array = field(default_factory=_no_ints)
    slots: Int32Array = field(default_factory=_no_ints)
    num_scheduled: Int32Array = field(default_factory=_no_ints)
    executor_epoch: int = 0
    swap_out_blocks: Int32Array = field(default_factory=_no_ints)
    swap_out_hosts: Int32Array = field(default_factory=_no_ints)
    swap_in_hosts: Int32Array = field(default_factory=_no_ints)
    swap_in_blocks: Int32Array = field(default_factory=_no_ints)
    cut_slots: Int32Array = field(default_factory=_no_ints)
    cut_blocks: Int32Array = field(default_factory=_no_ints)
    chosen_slots: Int32Array = field(default_factory=_no_ints)
    chosen_tokens: Int32Array = field(default_factory=_no_ints)


END_NONE, END_STOP, END_LENGTH, END_GRAMMAR = 0, 1, 2, 3
"""Values of ``StepResult.ends``: goes on; an end token was sampled; ``max_total_tokens`` was reached; the sequence's
grammar has become too costly to follow, and the token is no part of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The tokens one step sampled. Arrays share the length [n]; a sequence that ended in an earlier step has no row.

    ``token_indexes`` is the output index of the token in its sequence (0 for the first generated one).
    ``scheduler_epoch`` and ``step`` name the plan this answers. ``copied_step``: all copies between the tiers of plans
    up to this one were seen to be done; it may lag behind ``step``.

    Log probabilities are there for rows that asked, float32 values as their bits. ``logprob_rows`` [m] names those rows
    in ascending order, ``logprob_bits`` [m] is the token's own, ``top_counts`` [m] says how many entries of ``top_ids``
    and ``top_bits`` belong to the row, the most likely first.

    ``prompt_sequence_ids`` [q]: prompts of which this step computed a part: ``prompt_lengths`` tokens from position
    ``prompt_starts`` on (the first is 1), with ``prompt_top_counts`` most likely tokens for each position.
    ``prompt_bits`` and ``prompt_ranks`` hold one entry per position, ``prompt_top_ids`` and ``prompt_top_bits`` that
    many times as many, all one prompt after another. The rank of the most likely token is 1.

    ``pooled_sequence_ids`` [p]: prompts of which hidden states are wanted and this step computed some: the
    ``pooled_lengths`` tokens from position ``pooled_starts`` on. ``pooled_bits`` [p * hidden size] are the sums of
    their states, float32 as its bits.
    """

    step: int
    scheduler_epoch: int
    received_s: float
    launched_s: float
    done_s: float
    num_computed_tokens: int
    sequence_ids: Int32Array = field(default_factory=_no_ints)
    token_ids: Int32Array = field(default_factory=_no_ints)
    token_indexes: Int32Array = field(default_factory=_no_ints)
    ends: Int32Array = field(default_factory=_no_ints)
    copied_step: int = 0
    logprob_rows: Int32Array = field(default_factory=_no_ints)
    logprob_bits: Int32Array = field(default_factory=_no_ints)
    top_counts: Int32Array = field(default_factory=_no_ints)
    top_ids: Int32Array = field(default_factory=_no_ints)
    top_bits: Int32Array = field(default_factory=_no_ints)
    prompt_sequence_ids: Int32Array = field(default_factory=_no_ints)
    prompt_starts: Int32Array = field(default_factory=_no_ints)
    prompt_lengths: Int32Array = field(default_factory=_no_ints)
    prompt_top_counts: Int32Array = field(default_factory=_no_ints)
    prompt_bits: Int32Array = field(default_factory=_no_ints)
    prompt_ranks: Int32Array = field(default_factory=_no_ints)
    prompt_top_ids: Int32Array = field(default_factory=_no_ints)
    prompt_top_bits: Int32Array = field(default_factory=_no_ints)
    busy_s: float = 0.0
    """Seconds in which the device worked on the step: by events on CUDA, by the clock on a CPU."""
    pooled_sequence_ids: Int32Array = field(default_factory=_no_ints)
    pooled_starts: Int32Array = field(default_factory=_no_ints)
    pooled_lengths: Int32Array = field(default_factory=_no_ints)
    pooled_bits: Int32Array = field(default_factory=_no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFenced:
    """The last entry of a replica whose executor is gone: nothing after it can be written by the old executor.

    Written by the scheduler with a higher epoch. Readers know that the results before it are all there will be.
    """

    replica: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyBatch:
    """New text for requests of one ingress: column i of every field belongs to (request_ids[i], choice_indexes[i]).

    ``num_output_tokens`` is the count after this delta and ``text_offsets`` the number of characters before it, so what
    was sent before (text made anew begins at its beginning) can be recognised and dropped.
    ``finish_reasons[i]`` is None until the one terminal delta. ``stop_reasons[i]`` is the stop string or end token id.

    For choices that report tokens (none: all of this is empty) ``token_counts[i]`` entries of ``token_ids`` are new, of
    ``token_bits`` too if log probabilities are reported; then ``top_counts`` says for each token how many entries of
    ``top_ids`` and ``top_bits`` are its. Without log probabilities a token's ``top_counts`` entry is -1 and its bits 0.
    ``token_texts`` holds the text of every id, ``token_bytes`` (hexadecimal) the bytes of those that are no text alone.
    """

    request_ids: tuple[str, ...]
    texts: tuple[str, ...]
    finish_reasons: tuple[FinishReason | None, ...]
    stop_reasons: tuple[str | int | None, ...]
    choice_indexes: Int32Array = field(default_factory=_no_ints)
    num_output_tokens: Int32Array = field(default_factory=_no_ints)
    num_prompt_tokens: Int32Array = field(default_factory=_no_ints)
    num_cached_tokens: Int32Array = field(default_factory=_no_ints)
    token_texts: dict[int, str] = field(default_factory=dict)
    token_bytes: dict[int, str] = field(default_factory=dict)
    token_counts: Int32Array = field(default_factory=_no_ints)
    token_ids: Int32Array = field(default_factory=_no_ints)
    token_bits: Int32Array = field(default_factory=_no_ints)
    top_counts: Int32Array = field(default_factory=_no_ints)
    top_ids: Int32Array = field(default_factory=_no_ints)
    top_bits: Int32Array = field(default_factory=_no_ints)
    text_offsets: Int32Array = field(default_factory=_no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReply:
    """A request's prompt, for a client that wants to be told of it; comes before the terminal reply of any choice.

    ``token_ids`` [P]. With log probabilities (``num_top`` is not None): ``token_bits`` and ``ranks`` [P - 1] of the
    tokens from the second on, ``top_ids`` and ``top_bits`` [(P - 1) * num_top]. The texts are as in ReplyBatch.
    With pooling there are ``pooled_bits`` [hidden size] alone, a float32 vector as its bits.
    """

    request_id: str
    text: str
    num_top: int | None = None
    token_texts: dict[int, str] = field(default_factory=dict)
    token_bytes: dict[int, str] = field(default_factory=dict)
    token_ids: Int32Array = field(default_factory=_no_ints)
    token_bits: Int32Array = field(default_factory=_no_ints)
    ranks: Int32Array = field(default_factory=_no_ints)
    top_ids: Int32Array = field(default_factory=_no_ints)
    top_bits: Int32Array = field(default_factory=_no_ints)
    pooled_bits: Int32Array = field(default_factory=_no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed:
    """The one terminal message of a request that never ran or cannot go on. ``status`` is the HTTP status to answer."""

    request_id: str
    status: int
    error_type: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesNamed:
    """Journal: what these sequence ids, planned for ``replica`` from now on, stand for. Column i of every field."""

    replica: str
    executor_epoch: int
    request_ids: tuple[str, ...]
    sequence_ids: Int32Array = field(default_factory=_no_ints)
    choice_indexes: Int32Array = field(default_factory=_no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMoved:
    """Journal: the client of a request waits at this ingress now, with this attempt."""

    request_id: str
    ingress: str
    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Journal: the output of all sequences that have begun, as of ``positions`` in the results of each replica.

    Column i belongs to sequence i: ``lengths`` tokens of ``token_ids``, which ended as ``ends`` says (END_NONE: not).
    ``score_counts`` of these tokens, the first ones, have log probabilities: an entry each of ``bits`` and
    ``top_counts``, and as many as the latter says of ``top_ids`` and ``top_bits``. ``positions`` and
    ``executor_epochs`` are by replica. ``ingresses`` and ``detokenizers`` are the names of all that might have left
    something behind.
    """

    request_ids: tuple[str, ...]
    positions: dict[str, str]
    executor_epochs: dict[str, int]
    moved: tuple[RequestMoved, ...] = ()
    ingresses: tuple[str, ...] = ()
    detokenizers: tuple[str, ...] = ()
    sequence_ids: Int32Array = field(default_factory=_no_ints)
    choice_indexes: Int32Array = field(default_factory=_no_ints)
    lengths: Int32Array = field(default_factory=_no_ints)
    ends: Int32Array = field(default_factory=_no_ints)
    token_ids: Int32Array = field(default_factory=_no_ints)
    score_counts: Int32Array = field(default_factory=_no_ints)
    bits: Int32Array = field(default_factory=_no_ints)
    top_counts: Int32Array = field(default_factory=_no_ints)
    top_ids: Int32Array = field(default_factory=_no_ints)
    top_bits: Int32Array = field(default_factory=_no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Queued work, as any Redis client adds it: the fields of the entry are these, as plain text.

    ``request`` is one line of OpenAI's batch format. ``reply_to``: the stream for the result, "" for the usual one.
    ``priority``: an integer. ``batch``: a name under which progress is counted, "" for none.
    """

    request: str
    reply_to: str = ""
    priority: str = ""
    batch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What became of a job, as plain text: ``result`` is one line of OpenAI's batch output format. ``job`` is the id
    of the job's entry."""

    result: str
    custom_id: str = ""
    batch: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQueued:
    """Among jobs: a batch of ``/v1/batches``, whose record and files are in the store of the deployment."""

    batch_id: str


PLAIN_MESSAGES = (Job, JobResult, BatchQueued)
"""Messages that other programs write or read: their fields lie in the entry as they are, without a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """An operator ends this request: its client is told so with a :class:`RequestFailed`."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequested:
    """Somebody looks at the deployment through ``ingress``, where the :class:`SchedulerState` is to go.

    ``serial`` comes back in the answer. The asker knows the steps and the requests that are over up to these numbers
    of the scheduler with this ``epoch``; it is told of those after them.
    """

    ingress: str
    serial: int
    epoch: int = 0
    steps_seen: int = 0
    over_seen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica in a :class:`SchedulerState`. The next ``num_cached``, ``num_cached_hosts`` and ``num_pinned``
    entries of the state's columns of these names are its own. What is counted is counted since the replica joined.
    """

    name: str
    epoch: int
    step: int
    num_in_flight: int
    num_slots: int
    num_running: int
    token_budget: int
    block_size: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_pinned: int
    num_host_blocks: int
    num_host_free: int
    num_cached_hosts: int
    num_swaps: int
    num_recomputes: int
    prefix_queries: int
    prefix_hits: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    suspended: bool = False


REQUEST_COLUMNS = (
    "is_job", "priority", "num_prompt", "num_cached", "max_tokens", "num_choices", "num_live", "num_preemptions",
    "num_output", "outcome",
)  # fmt: skip
"""Of :class:`SchedulerState`. ``outcome``: one of the values below. ``max_tokens`` -1: as many as fit."""
REQUEST_MARKS = ("arrived", "taken", "tokenized", "started", "first_token", "ended", "over")
"""When a request arrived, was taken up by a tokenizer, was tokenized, entered a batch first, had its first token, its
last, and was with its client."""
OUTCOME_NONE, OUTCOME_DONE, OUTCOME_ABORTED = 0, 1, 2
SEQUENCE_COLUMNS = (
    "id", "request", "choice", "state", "replica", "slot", "num_tokens", "num_computed", "num_blocks",
    "num_host_blocks", "num_cached",
)  # fmt: skip
"""``request`` and ``replica`` are places in the lists of the state, -1: none. A waiting sequence with host blocks is
shown at the replica that has them."""
SEQUENCE_WAITING, SEQUENCE_LANDING, SEQUENCE_RUNNING = 0, 1, 2
STEP_COLUMNS = ("number", "replica", "step", "decodes", "prefill", "wasted", "copied", "swapped_out", "swapped_in")
"""``number`` counts steps of all replicas; ``wasted`` rows sampled tokens that nobody wanted any more."""
STEP_MARKS = ("planned", "received", "launched", "done", "landed", "busy")
"""When a step was planned, reached its executor, began on the device and was done there, and when the scheduler had its
result; ``busy`` is a time span, that in which the device worked."""
FLASH_COPIED, FLASH_SWAPPED_OUT, FLASH_SWAPPED_IN = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """What the scheduler knows and holds at ``at_s``; making it took ``took_s`` of CPU time.

    Tables of R requests, S sequences (those in slots, then the first of those that wait) and N steps, row by row, with
    the columns named above. Marks are float32 as their bits: seconds before ``at_s``, NaN for what has not happened.
    ``blocks`` and ``host_blocks`` are the sequences' block tables, one after another. ``cached_blocks`` are free and
    can still be found, on the host ``cached_hosts``; ``pinned_blocks`` are held as the source of a copy. Whatever is
    in none of these is free. ``flashed`` [k * 3]: replica, kind (FLASH_...) and device block of copies in these steps.
    """

    serial: int
    epoch: int
    at_s: float
    took_s: float
    replicas: tuple[ReplicaState, ...]
    request_ids: tuple[str, ...]
    num_waiting: int
    num_over: int
    """How many of the requests, the first ones, are over."""
    over_seen: int
    steps_seen: int
    requests: Int32Array = field(default_factory=_no_ints)
    request_marks: Int32Array = field(default_factory=_no_ints)
    sequences: Int32Array = field(default_factory=_no_ints)
    blocks: Int32Array = field(default_factory=_no_ints)
    host_blocks: Int32Array = field(default_factory=_no_ints)
    cached_blocks: Int32Array = field(default_factory=_no_ints)
    cached_hosts: Int32Array = field(default_factory=_no_ints)
    pinned_blocks: Int32Array = field(default_factory=_no_ints)
    steps: Int32Array = field(default_factory=_no_ints)
    step_marks: Int32Array = field(default_factory=_no_ints)
    flashed: Int32Array = field(default_factory=_no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequested:
    """Somebody points at one block of a replica and wants to know what is in it."""

    ingress: str
    serial: int
    replica: str
    block: int
    on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """What is in one block. ``owners`` are the requests whose sequences hold it, ``place`` is its index in the block
    table of the first of them, ``table`` [n] that whole table. ``hashes`` (hexadecimal) are the chain of contents that
    ends with this block, as far as it is full and known; of a block that nobody owns, its own only."""

    serial: int
    owners: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    place: int = -1
    table: Int32Array = field(default_factory=_no_ints)


Message = (
    GenerateRequest
    | TokenizedRequest
    | AbortRequest
    | StopSequence
    | RequestsDone
    | SequenceStarted
    | SequenceEnded
    | SchedulerLeads
    | StepPlan
    | StepResult
    | ReplicaFenced
    | ReplyBatch
    | PromptReply
    | RequestFailed
    | SequencesNamed
    | RequestMoved
    | Checkpoint
    | Job
    | JobResult
    | BatchQueued
    | CancelRequest
    | StateRequested
    | SchedulerState
    | BlockRequested
    | BlockState
)
