"""Queries about the scheduler's state: observers ask over ``control``; answers arrive in their mailboxes."""

from __future__ import annotations

from pagebus.bus.messages.field_types import NO_INTS, Int32Array
from pagebus.bus.messages.record import Record


class StateRequested(Record, frozen=True, kw_only=True):
    """Somebody looks at the deployment through ``ingress``, where the :class:`SchedulerState` is to go.

    ``serial`` comes back in the answer. The asker knows the steps and the requests that are over up to these numbers
    of the scheduler with this ``epoch``; it is told of those after them.
    """

    ingress: str
    serial: int
    epoch: int = 0
    steps_seen: int = 0
    over_seen: int = 0


class ReplicaState(Record, frozen=True, kw_only=True):
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
    num_parked: int = 0
    """Sequences that left the batch because whoever listened to them had gone: no preemptions."""
    given_back_blocks: int = 0
    """Blocks, or pages of blocks, that fell behind a sliding window."""
    most_drafts: int = 0
    """The most drafts of a row; 0: the executor does not speculate."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Drafts that steps have verified, and those of them that were right."""
    most_adapters: int = 0
    """The most adapters that sequences may have at a time."""
    adapters: tuple[str, ...] = ()
    """The names of those on the device, the one used last behind."""
    num_disk_blocks: int = 0
    """The most that the disk tier may hold; 0: there is none."""
    num_disk_used: int = 0
    pulled_blocks: int = 0
    lent_blocks: int = 0
    """Blocks copied here from the caches of other replicas, and from here to theirs."""
    role: str = ""
    """prefill or decode; nothing where all replicas do both."""
    num_departures: int = 0
    """Preempted sequences that were to go on on another replica."""
    num_adapter_blocks: int = 0
    """Those that the adapters on the device take."""


REQUEST_COLUMNS = (
    "is_job", "priority", "num_prompt", "num_cached", "max_tokens", "num_choices", "num_live", "num_preemptions",
    "num_output", "num_drafted", "num_accepted", "outcome",
)  # fmt: skip
"""Columns of :class:`SchedulerState`. ``outcome``: one of the values below. ``max_tokens`` -1: as many as fit."""
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
SEQUENCE_WAITING, SEQUENCE_IN_FLIGHT, SEQUENCE_RUNNING = 0, 1, 2
"""In flight: preempted, while steps under way still sample tokens for it."""
STEP_COLUMNS = ("number", "replica", "step", "decodes", "prefill", "wasted", "copied", "swapped_out", "swapped_in")
"""``number`` counts steps of all replicas, and pulls that end between them. ``wasted`` rows sampled tokens that nobody
wanted any more."""
STEP_MARKS = ("planned", "received", "launched", "done", "landed", "busy")
"""When a step was planned, reached its executor, began on the device and was done there, and when the scheduler had its
result; ``busy`` is a time span, that in which the device worked."""
FLASH_COPIED, FLASH_SWAPPED_OUT, FLASH_SWAPPED_IN, FLASH_PULLED = 0, 1, 2, 3


class SchedulerState(Record, frozen=True, kw_only=True):
    """What the scheduler knows and holds at ``at_s``; making it took ``took_s`` of CPU time.

    Tables of R requests, S sequences (those in slots, then the first of those that wait) and N steps, row by row, with
    the columns named above. Marks are float32 as their bits: seconds before ``at_s``, NaN for what has not happened.
    ``blocks`` and ``host_blocks`` are the sequences' block tables, one after another. ``cached_blocks`` are free and
    can still be found, on the host ``cached_hosts``. ``pinned_blocks`` are held while something is copied: the source
    of a copy, and both sides of a pull. ``adapter_blocks`` are those of adapters, whether sequences have them or not.
    Whatever is in none of these is free. ``flashed`` [k * 3]: replica, kind
    (FLASH_...) and device block of copies in these steps, and of pulls that have ended since.
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
    """Names of the API keys of the requests; empty where none are needed."""
    adapter_blocks: Int32Array = NO_INTS


class BlockRequested(Record, frozen=True, kw_only=True):
    """Somebody points at one block of a replica and wants to know what is in it."""

    ingress: str
    serial: int
    replica: str
    block: int
    on_host: bool = False


class BlockState(Record, frozen=True, kw_only=True):
    """What is in one block. ``owners`` are the requests whose sequences hold it, ``place`` is its index in the block
    table of the first of them, ``table`` [n] that whole table, from the sequence's block ``first_block`` on: those
    before lie behind its window. ``hashes`` (hexadecimal) are the chain of contents that
    ends with this block, as far as it is full and known; of a block that nobody owns, its own only."""

    serial: int
    owners: tuple[str, ...] = ()
    hashes: tuple[str, ...] = ()
    place: int = -1
    table: Int32Array = NO_INTS
    first_block: int = 0
    adapter: str = ""
    """The name of the adapter that lies there, with ``place`` and ``table`` among its own blocks."""
