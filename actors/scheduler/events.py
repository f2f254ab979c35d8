"""What goes into the scheduler's core besides bus messages, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagebus.bus.messages import (
    AbortRequest,
    CancelRequest,
    JsonValue,
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
    """A replica is ready, and its results are being read. ``epoch`` is its executor's lease epoch.

    ``max_num_batched_tokens`` is its token budget per step. The rates are measured, 0 if nobody did.
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


@dataclass(frozen=True, slots=True)
class HostTierGrown:
    """The replica's executor has got ``num_host_blocks`` host blocks ready by now."""

    replica: str
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class ReplicaSuspended:
    """Plan nothing more for this replica (its executor drains, or seems dead); results may still come."""

    replica: str


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """All results this replica will ever give have been handed in: take its sequences back. ``deaf`` are the
    detokenizers that may never have found it: its life was short."""

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
    """Nobody will read this ingress's replies: its clients may come back at another one."""

    ingress: str


@dataclass(frozen=True, slots=True)
class DetokenizersLive:
    """The detokenizers that take new sequences. Without any, nothing is started."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DetokenizerLost:
    """The text state of this detokenizer is gone: another one starts anew on its sequences."""

    detokenizer: str


@dataclass(frozen=True, slots=True)
class WorkHeld:
    """An operator holds the work from now on: ``mode`` is one of :data:`pagebus.bus.messages.HOLDS`."""

    mode: str


@dataclass(frozen=True, slots=True)
class CachesReset:
    """No block that is cached now is to be found again; ``host``: nor those of the host tier. ``running``: what runs
    is computed anew."""

    host: bool = False
    running: bool = False


Input = (
    TokenizedRequest
    | AbortRequest
    | CancelRequest
    | StopSequence
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
    """For a successor to start from."""

    message: SequencesNamed | RequestMoved


@dataclass(frozen=True, slots=True)
class RequestOver:
    """Nothing about this request needs to be kept any more. ``request`` is what it was, if it was ever admitted."""

    request_id: str
    request: Request | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class RequestGivenUp:
    """One executor after the other ends computing this request. It has been answered; what it was is to be kept."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence has lost its slot; ``swapped``: its blocks are kept on the host. ``parked``: because nobody listens to
    it at present, not for want of blocks."""

    request_id: str
    sequence_id: int
    replica: str
    swapped: bool
    parked: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Something for the log, and for nothing else."""

    event: str
    fields: Mapping[str, JsonValue] = field(default_factory=dict)


Output = ToReplica | ToDetokenizer | ToIngress | ToJournal | RequestOver | RequestGivenUp | Preempted | Note


class ProtocolError(Exception):
    """A result that cannot be true: its replica cannot be trusted any more. The core has not changed."""
