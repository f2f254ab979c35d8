"""Queries about the scheduler's state: observers ask over ``control``; answers arrive in their mailboxes."""

from __future__ import annotations

from pagebus.bus.messages.field_types import NO_INTS, Int32Array
from pagebus.bus.messages.record import Record


class StateRequested(Record, frozen=True, kw_only=True):
    """An observer requests a :class:`SchedulerState`, which is sent to ``ingress``.

    The answer repeats ``serial``. It has the steps, and the requests that are over, with numbers above ``steps_seen``
    and ``over_seen``, which count for the scheduler of this ``epoch``.
    """

    ingress: str
    serial: int
    epoch: int = 0
    steps_seen: int = 0
    over_seen: int = 0


class ReplicaState(Record, frozen=True, kw_only=True):
    """One replica in a :class:`SchedulerState`. The next ``num_cached``, ``num_cached_hosts``, ``num_pinned`` and
    ``num_adapter_blocks`` entries of the state's columns of blocks are its own. Counters begin when the replica joins.
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
    num_parked: int = 0
    """Sequences that left the batch because their reader had gone; they are not preemptions."""
    given_back_blocks: int = 0
    """Blocks, or pages of blocks, that fell out of a sliding window."""
    most_drafts: int = 0
    """The most drafts per row; 0: the executor does not speculate."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts that steps have verified, and those of them that were accepted."""
    most_adapters: int = 0
    """The most adapters that sequences may use at a time."""
    adapters: tuple[str, ...] = ()
    """The names of the adapters on the device, most recently used last."""
    num_disk_blocks: int = 0
    """The most blocks that the disk tier may hold; 0: there is none."""
    num_disk_used: int = 0
    pulled_blocks: int = 0
    lent_blocks: int = 0
    """Blocks copied here from the caches of other replicas, and from here to theirs."""
    role: str = ""
    """``prefill`` or ``decode``; empty if all replicas do both."""
    num_departures: int = 0
    """Preempted sequences that were to continue on another replica."""
    num_adapter_blocks: int = 0
    """Blocks that the adapters on the device take."""


REQUEST_COLUMNS = (
    "is_job", "priority", "num_prompt", "num_cached", "max_tokens", "num_choices", "num_live", "num_preemptions",
    "num_output", "num_drafted", "num_accepted", "outcome",
)  # fmt: skip
"""Columns of :class:`SchedulerState`. ``outcome``: one of the values below. ``max_tokens`` -1: as many as fit."""
REQUEST_MARKS = ("arrived", "taken", "tokenized", "started", "first_token", "ended", "over")
"""Times at which a request arrived, was taken up by a tokenizer, was tokenized, first entered a batch, had its first
token, had its last, and was delivered."""
OUTCOME_NONE, OUTCOME_DONE, OUTCOME_ABORTED = 0, 1, 2
SEQUENCE_COLUMNS = (
    "id", "request", "choice", "state", "replica", "slot", "num_tokens", "num_computed", "num_blocks",
    "num_host_blocks", "num_cached",
)  # fmt: skip
"""``request`` and ``replica`` are indexes into the state's lists, -1: none. A waiting sequence with host blocks is
listed with the replica that has them."""
SEQUENCE_WAITING, SEQUENCE_IN_FLIGHT, SEQUENCE_RUNNING = 0, 1, 2
"""In flight: preempted, while steps in flight still sample tokens for it."""
STEP_COLUMNS = ("number", "replica", "step", "decodes", "prefill", "wasted", "copied", "swapped_out", "swapped_in")
"""``number`` counts steps of all replicas, and pulls that end between them. ``decodes`` are tokens, with drafts.
``wasted`` rows sampled tokens for sequences that were over."""
STEP_MARKS = ("planned", "received", "launched", "done", "landed", "busy")
"""Times at which a step was planned, reached its executor, began and ended on the device, and its result reached the
scheduler. ``busy`` is a duration: how long the device worked."""
FLASH_COPIED, FLASH_SWAPPED_OUT, FLASH_SWAPPED_IN, FLASH_PULLED = 0, 1, 2, 3


class SchedulerState(Record, frozen=True, kw_only=True):
    """The scheduler's state at ``at_s``; making it took ``took_s`` seconds of CPU time.

    Tables of R requests, S sequences (those in slots, then the first waiting ones) and N steps, row by row, with the
    columns named above. Marks are float32 bits: seconds before ``at_s``, NaN for what has not happened.
    ``blocks`` and ``host_blocks`` are the sequences' block tables, one after another. ``cached_blocks`` are free blocks
    that can still be found, ``cached_hosts`` the same on the host. ``pinned_blocks`` are held for copies: the source
    of a copy, and both sides of a pull. ``adapter_blocks`` belong to adapters, used or not. All other blocks are free.
    ``flashed`` [k * 3]: replica, kind (FLASH_...) and device block of copies in these steps, and of pulls that have
    ended since.
    """

    serial: int
    epoch: int
    at_s: float
    took_s: float
    replicas: tuple[ReplicaState, ...]
    request_ids: tuple[str, ...]
    num_waiting: int
    num_over: int
    """How many of the requests are over; they come first."""
    over_seen: int
    steps_seen: int
    requests: Int32Array = NO_INTS
    request_marks: Int32Array = NO_INTS
    sequences: Int32Array = NO_INTS
    blocks: Int32Array = NO_INTS
    host_blocks: Int32Array = NO_INTS
    cached_blocks: Int32Array = NO_INTS
    cached_hosts: Int32Array = NO_INTS
    pinned_blocks: Int32Array = NO_INTS
    steps: Int32Array = NO_INTS
    step_marks: Int32Array = NO_INTS
    flashed: Int32Array = NO_INTS
    clients: tuple[str, ...] = ()
    """Names of the API keys of the requests; empty if no keys are needed."""
    adapter_blocks: Int32Array = NO_INTS


class BlockRequested(Record, frozen=True, kw_only=True):
    """An observer asks what is in one block of a replica."""

    ingress: str
    serial: int
    replica: str
    block: int
    on_host: bool = False


class BlockState(Record, frozen=True, kw_only=True):
    """The content of one block. ``owners`` are the requests whose sequences hold it. ``place`` is its index in
    ``table`` [n], the block table of the first of them, from the sequence's block ``first_block`` on (earlier ones are
    outside its window). ``hashes`` (hexadecimal) are the hashes of the sequence's blocks up to this one, as far as they
    are full and known; for a block without owner, only its own."""

    serial: int
    owners: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    place: int = -1
    table: Int32Array = NO_INTS
    first_block: int = 0
    adapter: str = ""
    """The name of the adapter in the block; ``place`` and ``table`` then refer to the adapter's blocks."""
