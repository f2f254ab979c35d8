"""What a scheduler leaves to its successor."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.messages.field_types import Int32Array, no_ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesNamed:
    """Journal: what these sequence ids, planned for ``replica`` from now on, stand for. Column i of every field."""

    replica: str
    executor_epoch: int
    request_ids: tuple[str, ...]
    sequence_ids: Int32Array = field(default_factory=no_ints)
    choice_indexes: Int32Array = field(default_factory=no_ints)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoReads:
    """One more client of a request, with an attempt of its own at another ingress."""

    ingress: str
    attempt: str
    asked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMoved:
    """Journal: the client of a request waits at this ingress now, with this attempt, and so do ``others``. ``asked`` is
    the place of the last attempt of all, be it of somebody who has left."""

    request_id: str
    ingress: str
    attempt: str
    asked: int = 0
    others: tuple[AlsoReads, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBlamed:
    """Journal: the scheduler ends by an error (``reason``) at this request; schedulers have done so ``times`` times."""

    request_id: str
    reason: str
    times: int


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
    sequence_ids: Int32Array = field(default_factory=no_ints)
    choice_indexes: Int32Array = field(default_factory=no_ints)
    lengths: Int32Array = field(default_factory=no_ints)
    ends: Int32Array = field(default_factory=no_ints)
    token_ids: Int32Array = field(default_factory=no_ints)
    score_counts: Int32Array = field(default_factory=no_ints)
    bits: Int32Array = field(default_factory=no_ints)
    top_counts: Int32Array = field(default_factory=no_ints)
    top_ids: Int32Array = field(default_factory=no_ints)
    top_bits: Int32Array = field(default_factory=no_ints)
    blamed: tuple[RequestBlamed, ...] = ()
