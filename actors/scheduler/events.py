"""Inputs of the scheduler's core that are not bus messages, and its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagebus.bus.messages import (
    AbortRequest,
    AdapterRead,
    CancelRequest,
    DiskReport,
    JsonValue,
    PullReport,
    RequestFailed,
    RequestMoved,
    RequestsDone,
    SequenceEnded,
    SequencesNamed,
    SequenceStarted,
    StepPlan,
    StepResult,
    StopSequence,
    TokenizedRequest,
)

if TYPE_CHECKING:
    from pagebus.actors.scheduler.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJoined:
    """A replica is ready and its results are being read. ``epoch`` is its executor's lease epoch.

    ``max_num_batched_tokens`` is its token budget per step. Rates are measured; 0 means not measured.
    """

    replica: str
    epoch: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_host_blocks: int = 0
    block_bytes: int = 0
    copy_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    windowed_pages: int = 0
    """If only some layers have a window: pages of these layers per block, besides the one page of the others."""
    windowed_tokens: int = 0
    """Their window: how many tokens, the newest included, such a layer reads."""
    num_drafts: int = 0
    """The most drafts per row; 0: it does not speculate."""
    max_loras: int = 0
    """The most adapters that its sequences may use at a time; 0: it takes none."""
    most_loras: int = 0
    """The most adapters that its executor holds in memory, those on the device included; at least ``max_loras``."""
    ranks: int = 1
    """Executors that compute it together. Each reports on an adapter."""
    num_disk_blocks: int = 0
    """The most blocks of its disk tier; 0: it has none."""
    stages: int = 1
    """Pipeline stages that each of its steps passes in turn, while other steps are in other stages."""
    kv_kind: str = ""
    """Identifies how its blocks are computed. Replicas of the same kind may pull blocks from each other; empty: it does
    not pull."""
    kv_address: str = ""
    """The address at which others can pull its blocks."""
    kv_host: str = ""
    """The host whose executors can read its host tier; empty: none can."""


@dataclass(frozen=True, slots=True)
class HostTierGrown:
    """The replica's executor now has ``num_host_blocks`` host blocks ready."""

    replica: str
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class ReplicaSuspended:
    """Plan nothing more for this replica: its executor drains or seems dead. Results may still arrive. ``drains``: it
    stays while its blocks are needed."""

    replica: str
    drains: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """All results of this replica have been handled; its sequences are queued again. ``deaf`` names detokenizers that
    may never have read its results."""

    replica: str
    reason: str = ""
    deaf: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """The result of one step of ``replica``."""

    replica: str
    result: StepResult


@dataclass(frozen=True, slots=True)
class IngressLost:
    """This ingress is gone. Its clients may come back at another one."""

    ingress: str


@dataclass(frozen=True, slots=True)
class DetokenizersLive:
    """The detokenizers that accept new sequences. No sequence starts without one."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DetokenizerLost:
    """This detokenizer and its text state are gone. Its sequences are announced to another one."""

    detokenizer: str


@dataclass(frozen=True, slots=True)
class WorkHeld:
    """An operator holds the work: ``mode`` is one of :data:`pagebus.bus.messages.HOLDS`."""

    mode: str


@dataclass(frozen=True, slots=True)
class CachesReset:
    """Forget the cached blocks on the device; ``host``: in the host tier too. ``running``: also recompute running
    sequences."""

    host: bool = False
    running: bool = False


Input = (
    TokenizedRequest
    | AbortRequest
    | CancelRequest
    | StopSequence
    | AdapterRead
    | DiskReport
    | PullReport
    | RequestsDone
    | ReplicaJoined
    | HostTierGrown
    | ReplicaSuspended
    | ReplicaLost
    | ReplicaResult
    | IngressLost
    | DetokenizersLive
    | DetokenizerLost
    | WorkHeld
    | CachesReset
)


@dataclass(frozen=True, slots=True)
class ToReplica:
    replica: str
    message: StepPlan


@dataclass(frozen=True, slots=True)
class ToDetokenizer:
    detokenizer: str
    message: SequenceStarted | SequenceEnded


@dataclass(frozen=True, slots=True)
class ToIngress:
    ingress: str
    message: RequestFailed


@dataclass(frozen=True, slots=True)
class ToJournal:
    """An entry of the journal for a successor."""

    message: SequencesNamed | RequestMoved


@dataclass(frozen=True, slots=True)
class RequestOver:
    """A request of which nothing is kept any more. ``request`` is None if it was never admitted."""

    request_id: str
    request: Request | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RequestGivenUp:
    """A request that failed because its executors were lost repeatedly. It has been answered, and is kept as a dead
    letter."""

    request_id: str
    reason: str


PREEMPTED, PARKED, MOVED = "preempted", "parked", "moved"


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence has lost its slot. ``swapped``: its blocks are kept on the host. ``why``: for want of blocks, because
    its client is away ("parked"), or to go on elsewhere ("moved"): its executor drains, has another role, or has no
    block for it."""

    request_id: str
    sequence_id: int
    replica: str
    swapped: bool
    why: str = PREEMPTED


@dataclass(frozen=True, slots=True)
class BlocksPulled:
    """A pull into these blocks of a replica has ended. Only observers need it."""

    replica: str
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Note:
    """A log line. Nothing else depends on it."""

    event: str
    fields: Mapping[str, JsonValue] = field(default_factory=dict)


Output = (
    ToReplica | ToDetokenizer | ToIngress | ToJournal | RequestOver | RequestGivenUp | Preempted | BlocksPulled | Note
)


class ProtocolError(Exception):
    """A result that contradicts the plans, so its replica cannot be trusted. The core is unchanged."""
