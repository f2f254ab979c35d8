"""Control of requests under way: from ingresses, detokenizers and operators to the scheduler, or to other ingresses."""

from __future__ import annotations

from pagebus.bus.messages.record import Record


class AbortRequest(Record, frozen=True, kw_only=True):
    """The client of ``request_id`` is gone: free everything the request holds, and send nothing more.

    ``attempt`` is the attempt that the client left; if it has made a later one, the request continues.
    ``may_return``: the client may come back for the rest, so the request continues for a while.
    """

    request_id: str
    reason: str = "client disconnected"
    attempt: str = ""
    may_return: bool = False


class RequestsDone(Record, frozen=True, kw_only=True):
    """Clients have received the complete answers of these requests: nothing needs to be kept of them."""

    request_ids: tuple[str, ...]
    attempts: tuple[str, ...]


class StopSequence(Record, frozen=True, kw_only=True):
    """The detokenizer found a stop string and has already sent the terminal reply: stop computing this sequence."""

    request_id: str
    sequence_id: int


class CancelRequest(Record, frozen=True, kw_only=True):
    """An operator ends this request. Its client gets a :class:`RequestFailed`."""

    request_id: str


class AbortCalls(Record, frozen=True, kw_only=True):
    """A client, named by its API key, ends its calls: those whose answers have these ``ids``, or all if it is empty."""

    client: str
    ids: tuple[str, ...]
