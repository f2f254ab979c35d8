"""The journal that a scheduler writes for its successor."""

from __future__ import annotations

from pagebus.bus.messages.field_types import NO_INTS, Int32Array
from pagebus.bus.messages.record import Record


class SequencesNamed(Record, frozen=True, kw_only=True):
    """Journal: the requests and choices behind sequence ids that are planned for ``replica`` from now on. Column i of
    every field belongs to sequence i."""

    replica: str
    executor_epoch: int
    request_ids: tuple[str, ...]
    sequence_ids: Int32Array = NO_INTS
    choice_indexes: Int32Array = NO_INTS


class AlsoReads(Record, frozen=True, kw_only=True):
    """Another client of a request, with its own attempt at another ingress."""

    ingress: str
    attempt: str
    asked: int = 0


class RequestMoved(Record, frozen=True, kw_only=True):
    """Journal: the client of a request now waits at this ingress, with this attempt, and so do ``others``. ``asked`` is
    the place of the latest attempt, even if its client has left."""

    request_id: str
    ingress: str
    attempt: str
    asked: int = 0
    others: tuple[AlsoReads, ...] = ()


class RequestBlamed(Record, frozen=True, kw_only=True):
    """Journal: the scheduler fails with an error (``reason``) on this request; ``times`` schedulers have done so."""

    request_id: str
    reason: str
    times: int


class Checkpoint(Record, frozen=True, kw_only=True):
    """Journal: the output of all sequences that have begun, as of ``positions`` in the results of each replica.

    Column i belongs to sequence i. It has ``lengths`` tokens in ``token_ids``, and has ended as ``ends`` says
    (END_NONE: it has not). The first ``score_counts`` of these tokens have log probabilities: one entry each in
    ``bits`` and ``top_counts``, and ``top_counts`` entries each in ``top_ids`` and ``top_bits``. ``positions`` and
    ``executor_epochs`` are by replica. ``ingresses`` and ``detokenizers`` name all that may have left something behind.
    """

    request_ids: tuple[str, ...]
    positions: dict[str, str]
    executor_epochs: dict[str, int]
    moved: tuple[RequestMoved, ...] = ()
    ingresses: tuple[str, ...] = ()
    detokenizers: tuple[str, ...] = ()
    sequence_ids: Int32Array = NO_INTS
    choice_indexes: Int32Array = NO_INTS
    lengths: Int32Array = NO_INTS
    ends: Int32Array = NO_INTS
    token_ids: Int32Array = NO_INTS
    score_counts: Int32Array = NO_INTS
    bits: Int32Array = NO_INTS
    top_counts: Int32Array = NO_INTS
    top_ids: Int32Array = NO_INTS
    top_bits: Int32Array = NO_INTS
    blamed: tuple[RequestBlamed, ...] = ()
