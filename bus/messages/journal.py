"""The journal that a scheduler writes for its successor."""

from __future__ import annotations

from pagebus.bus.messages.field_types import NO_INTS, Int32Array
from pagebus.bus.messages.record import Record


class SequencesNamed(Record, frozen=True, kw_only=True):
    """Journal: what these sequence ids, planned for ``replica`` from now on, stand for. Column i of every field."""

    replica: str
    executor_epoch: int
    request_ids: tuple[str, ...]
    sequence_ids: Int32Array = NO_INTS
    choice_indexes: Int32Array = NO_INTS


class AlsoReads(Record, frozen=True, kw_only=True):
    """A further client of a request, with its own attempt at another ingress."""

    ingress: str
    attempt: str
    asked: int = 0


class RequestMoved(Record, frozen=True, kw_only=True):
    """Journal: the client of a request waits at this ingress now, with this attempt, and so do ``others``. ``asked`` is
    the place of the last attempt of all, be it of somebody who has left."""

    request_id: str
    ingress: str
    attempt: str
    asked: int = 0
    others: tuple[AlsoReads, ...] = ()


class RequestBlamed(Record, frozen=True, kw_only=True):
    """Journal: the scheduler ends by an error (``reason``) at this request; schedulers have done so ``times`` times."""

    request_id: str
    reason: str
    times: int


class Checkpoint(Record, frozen=True, kw_only=True):
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
