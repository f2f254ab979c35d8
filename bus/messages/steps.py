"""Step plans, scheduler -> executor, and step results, executor -> scheduler and detokenizers."""

from __future__ import annotations

from pagebus.bus.messages.field_types import NO_INTS, Int32Array
from pagebus.bus.messages.moves import BlockPull, PullReport
from pagebus.bus.messages.record import Record
from pagebus.bus.messages.requests import MOST_PREDICTION_TOKENS, AdapterSource
from pagebus.bus.messages.sampling import SamplingParams

CONTEXT_TOKENS = 64
"""The most prompt tokens before a prediction: as many as a lookup compares."""
MOST_PREDICTED_TOKENS = CONTEXT_TOKENS + MOST_PREDICTION_TOKENS
"""The most tokens in ``new_predicted`` of one sequence."""


class NewSequence(Record, frozen=True, kw_only=True):
    """A sequence that enters the persistent batch at ``slot``. Its arrays are in the step plan, in the same order.

    ``num_prompt_tokens`` counts the client's prompt. ``num_tokens`` may be larger: after a preemption the token array
    also holds tokens generated before. ``num_computed_tokens`` of them are already in the KV cache (prefix hit, or
    swapped in), perhaps with a last block that is not full. ``max_total_tokens`` is the length (prompt + output) at
    which the sequence ends. ``end_token_ids`` end it earlier, from the ``sampling.min_tokens``-th output token on;
    before that they are never sampled.

    ``sampling`` is the request's own; ``seed``, ``end_token_ids`` and ``max_total_tokens`` of the sequence replace
    what it says. ``sampling.prompt_logprobs`` is None if another sequence reports them. Only computed positions are
    reported, because tokens found in the cache have no log probability.
    """

    sequence_id: int
    slot: int
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_blocks: int
    max_total_tokens: int
    seed: int
    sampling: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    pooled_from: int | None = None
    """The prompt's final hidden states from this token on are reported, as far as they are computed."""
    pooled_until: int | None = None
    """Hidden states from this token on are not reported; None: all are, up to the prompt's end."""
    first_block: int = 0
    """The index in its block table at which its ``num_blocks`` blocks begin. Tokens before them are outside the sliding
    window of everything computed from now on."""
    first_windowed: int = 0
    """The same for its pages in ``new_windowed``, which end with the same block."""
    num_predicted: int = 0
    """Tokens of the expected output, in ``new_predicted``: drafts are looked up there, too. Up to ``CONTEXT_TOKENS``
    last tokens of the prompt come first."""
    adapter: str = ""
    """The digest of its adapter, which an :class:`AdapterRead` has reported as read; empty: none."""
    first_token: int = 0
    """The position of its first token in ``new_token_ids``. Those before it are computed prompt tokens whose ids
    nothing reads."""


class AdapterPlaced(Record, frozen=True, kw_only=True):
    """An adapter to copy into the next ``num_blocks`` entries of a plan's ``adapter_blocks``."""

    digest: str
    num_blocks: int


class StepPlan(Record, frozen=True, kw_only=True):
    """One forward pass, as a delta to the executor's persistent batch. Applied strictly in this order.

    1. ``freed_slots`` [k]: these slots are empty now.
    2. ``new_sequences``: fill slots. ``new_token_ids`` concatenates their tokens, each from its ``first_token`` on, and
       ``new_block_ids`` their block tables.
    3. ``cut_slots`` / ``cut_blocks`` [b]: keep that many blocks of the slot's table. ``chosen_slots`` and
       ``chosen_tokens`` [t]: the slot's last token is this one, whatever was sampled. (So a beam takes over another's
       past. The plan does not repeat the slot's earlier tokens, because nothing reads them.)
       Then ``appended_slots`` / ``appended_blocks`` [m]: append one block to the slot's block table, in order.
    4. ``copy_sources`` / ``copy_targets`` [c]: device block copies (copy-on-write), before the forward pass.
    5. The pass: ``slots`` [r] with ``num_scheduled`` [r] tokens each, from the slot's computed count on. A row whose
       computed count reaches its token count samples one token, which is stored on the device as the slot's next token
       and returned. Decode rows come first: the first ``num_decodes`` rows have one scheduled token that is the slot's
       last token.

    Before all of these, blocks are copied between the two tiers: ``swap_out_blocks`` [o] (device) to
    ``swap_out_hosts`` [o] (host), in order; then ``swap_in_hosts`` [i] to ``swap_in_blocks`` [i], in order. A swap-out
    reads what all earlier steps have left in its device block, before this plan writes there. A swap-in may read a host
    block that the same plan has written. It is complete before this or a later step reads its device block, and the
    next plan may write its host block. The executor may run copies beside steps as long as the result is the same.

    If only some layers of a model have a window, a block of tokens has several pages of equal size. The block ids above
    are pages of the layers without a window. ``new_windowed`` and ``appended_windowed`` are pages of the others, always
    the same number w per block, block after block: for each new sequence, those from its ``first_windowed`` on; and w
    for each of ``appended_slots``. Copies name pages of both kinds.

    If sequences speculate (docs/speculation.md), rows with drafts follow the first ``num_decodes``. Such a row has the
    slot's last token and, after it, drafts, which the device holds. It samples after each draft that equals what it has
    sampled itself. Until the results arrive, only the device knows the lengths of these sequences.
    ``earliest_starts`` and ``latest_starts`` [d], of all decodes and rows with drafts, bound the position of each row's
    first token. They are empty in plans for executors that do not speculate.

    ``dropped_adapters`` are digests of adapters to forget, and ``loaded_adapters`` are to be read in their place: first
    drops, then loads, both before everything else. An executor reads adapters into host memory beside its steps, and
    reports each with an :class:`AdapterRead`. ``placed_adapters`` have been read. They are copied into
    ``adapter_blocks`` of the cache, adapter after adapter, after the copies between the tiers, and before this or a
    later step uses them. Once a plan names these blocks for something else, no sequence uses the adapter.

    After the copies between the tiers, and beside this and later steps, host blocks are written to the disk and read
    from it. Names are those of the contents (:func:`pagebus.actors.scheduler.kv.disk_pool.name_of`). ``disk_writes``
    [w]: write ``disk_write_hosts`` [w]. ``disk_reads`` [l]: read into ``disk_read_hosts`` [l]. ``disk_drops``: delete.
    ``disk_order``: :data:`DISK_TELL` or :data:`DISK_FORGET`, before the others. A :class:`DiskReport` says what became
    of each. Until then plans do nothing with these host blocks but read those that are being written.

    ``pulls`` copy blocks of other executors, ``pull_sources`` [p], into ``pull_blocks`` [p], beside this and later
    steps. They begin after the steps before this plan and after its copies. A :class:`PullReport` says what became of
    each, or promises it. Until then no plan names their device blocks.

    ``is_last``: the executor drains, and nobody pulls from it any more.

    A plan with no rows is legal (it only frees or copies). ``step`` counts plans of this replica in this scheduler
    epoch, from 1, and equals the index of the entry's explicit stream id.

    ``executor_epoch`` is the lease epoch of the executor that the plan is for (0: any). An executor skips plans for
    another one, which it has replaced without the scheduler knowing yet.
    """

    step: int
    planned_s: float
    num_decodes: int
    new_sequences: tuple[NewSequence, ...] = ()
    freed_slots: Int32Array = NO_INTS
    new_token_ids: Int32Array = NO_INTS
    new_block_ids: Int32Array = NO_INTS
    appended_slots: Int32Array = NO_INTS
    appended_blocks: Int32Array = NO_INTS
    copy_sources: Int32Array = NO_INTS
    copy_targets: Int32Array = NO_INTS
    slots: Int32Array = NO_INTS
    num_scheduled: Int32Array = NO_INTS
    executor_epoch: int = 0
    swap_out_blocks: Int32Array = NO_INTS
    swap_out_hosts: Int32Array = NO_INTS
    swap_in_hosts: Int32Array = NO_INTS
    swap_in_blocks: Int32Array = NO_INTS
    cut_slots: Int32Array = NO_INTS
    cut_blocks: Int32Array = NO_INTS
    chosen_slots: Int32Array = NO_INTS
    chosen_tokens: Int32Array = NO_INTS
    new_windowed: Int32Array = NO_INTS
    appended_windowed: Int32Array = NO_INTS
    earliest_starts: Int32Array = NO_INTS
    latest_starts: Int32Array = NO_INTS
    new_predicted: Int32Array = NO_INTS
    loaded_adapters: tuple[AdapterSource, ...] = ()
    dropped_adapters: tuple[str, ...] = ()
    disk_reads: tuple[str, ...] = ()
    disk_read_hosts: Int32Array = NO_INTS
    disk_writes: tuple[str, ...] = ()
    disk_write_hosts: Int32Array = NO_INTS
    disk_drops: tuple[str, ...] = ()
    disk_order: int = 0
    pulls: tuple[BlockPull, ...] = ()
    pull_sources: Int32Array = NO_INTS
    pull_blocks: Int32Array = NO_INTS
    is_last: bool = False
    placed_adapters: tuple[AdapterPlaced, ...] = ()
    adapter_blocks: Int32Array = NO_INTS

    @property
    def num_decode_rows(self) -> int:
        """How many of the first rows are decodes, those with drafts among them; the others compute prompts."""
        return max(self.num_decodes, len(self.latest_starts))


END_NONE, END_STOP, END_LENGTH, END_GRAMMAR = 0, 1, 2, 3
"""Values of ``StepResult.ends``: continues; an end token was sampled; ``max_total_tokens`` was reached; the sequence's
grammar has become too costly to follow, and the token is not part of the output."""


class StepResult(Record, frozen=True, kw_only=True):
    """The tokens one step sampled. Arrays share the length [n]; a sequence that ended in an earlier step has no row.
    If drafts were accepted, a sequence has several consecutive rows, none after its end.

    ``token_indexes`` is the output index of the token in its sequence (0 for the first generated one).
    ``scheduler_epoch`` and ``step`` name the plan this answers. ``copied_step``: the last plan up to which all copies
    between the tiers are known to be done; it may lag behind ``step``.

    Rows that requested log probabilities have them as the bits of float32. ``logprob_rows`` [m] names those rows in
    ascending order, ``logprob_bits`` [m] is the token's own, ``top_counts`` [m] says how many entries of ``top_ids``
    and ``top_bits`` belong to the row, the most likely first.

    ``prompt_sequence_ids`` [q]: prompts of which this step scored a part: ``prompt_lengths`` tokens from position
    ``prompt_starts`` on (the first is 1), with ``prompt_top_counts`` most likely tokens for each position.
    ``prompt_bits`` and ``prompt_ranks`` hold one entry per position, ``prompt_top_ids`` and ``prompt_top_bits`` that
    many times as many, prompt after prompt. The rank of the most likely token is 1.

    ``pooled_sequence_ids`` [p]: prompts whose hidden states are requested, and of which this step computed some: those
    of ``pooled_lengths`` tokens from position ``pooled_starts`` on. ``pooled_bits`` [p * hidden size] are the sums of
    these states, as the bits of float32.
    """

    step: int
    scheduler_epoch: int
    received_s: float
    launched_s: float
    done_s: float
    num_computed_tokens: int
    sequence_ids: Int32Array = NO_INTS
    token_ids: Int32Array = NO_INTS
    token_indexes: Int32Array = NO_INTS
    ends: Int32Array = NO_INTS
    copied_step: int = 0
    logprob_rows: Int32Array = NO_INTS
    logprob_bits: Int32Array = NO_INTS
    top_counts: Int32Array = NO_INTS
    top_ids: Int32Array = NO_INTS
    top_bits: Int32Array = NO_INTS
    prompt_sequence_ids: Int32Array = NO_INTS
    prompt_starts: Int32Array = NO_INTS
    prompt_lengths: Int32Array = NO_INTS
    prompt_top_counts: Int32Array = NO_INTS
    prompt_bits: Int32Array = NO_INTS
    prompt_ranks: Int32Array = NO_INTS
    prompt_top_ids: Int32Array = NO_INTS
    prompt_top_bits: Int32Array = NO_INTS
    busy_s: float = 0.0
    """Seconds that the device worked on the step: by events on CUDA, by the clock on a CPU."""
    pooled_sequence_ids: Int32Array = NO_INTS
    pooled_starts: Int32Array = NO_INTS
    pooled_lengths: Int32Array = NO_INTS
    pooled_bits: Int32Array = NO_INTS
    num_drafts: Int32Array = NO_INTS
    """From executors that speculate [n]: how many drafts are ready after the sequence's newest token."""


class AdapterRead(Record, frozen=True, kw_only=True):
    """Executor -> scheduler, over ``control``: an adapter that plan ``step`` loads is in memory, for plans written from
    now on; or, with an ``error``, it cannot be read. Each ``rank`` of an executor reports on its part."""

    replica: str
    executor_epoch: int
    scheduler_epoch: int
    step: int
    digest: str
    error: str = ""
    rank: int = 0
    num_blocks: int = 0
    """Blocks of the cache that it takes while it is on the device."""


DISK_TELL, DISK_FORGET = 1, 2
"""Values of ``StepPlan.disk_order``: report what is on the disk; delete all of it."""


class DiskReport(Record, frozen=True, kw_only=True):
    """Executor -> scheduler, over ``control``: what became of disk orders. Names are those of plans.

    ``read`` and ``written`` are done. ``not_read`` and ``not_written`` have failed, and are not on the disk any more.
    ``found``: contents on the disk, in answer to :data:`DISK_TELL`, least recently used first; perhaps in several
    reports. ``bytes_per_s``: the rate of the reads; 0 without any. ``error``: the first error of its kind, for the log.
    """

    replica: str
    executor_epoch: int
    scheduler_epoch: int
    read: tuple[str, ...] = ()
    not_read: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    not_written: tuple[str, ...] = ()
    found: tuple[str, ...] = ()
    bytes_per_s: float = 0.0
    error: str = ""
    number: int = 0
    """The number of the report, by which repeats are recognised; 0: it is not numbered."""


FromExecutor = StepResult | AdapterRead | DiskReport | PullReport
"""What engines send to the scheduler."""


class ReplicaFenced(Record, frozen=True, kw_only=True):
    """The last entry of a replica whose executor is gone: nothing after it can be written by the old executor.

    Written by the scheduler, or by an executor that fails: ``error`` is then the type of its error. No more results
    follow.
    """

    replica: str
    reason: str
    error: str = ""
