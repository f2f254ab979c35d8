"""Control of requests under way: from ingresses, detokenizers and operators to the scheduler, or to other ingresses."""

from __future__ import annotations

from pagebus.bus.messages.record import Record


class AbortRequest(Record, frozen=True, kw_only=True):
    """The client of ``request_id`` is gone: free everything it holds, send nothing more.

    ``attempt`` is the one that the client left: a request that was asked for again since goes on.
    ``may_return``: the client said that it may come back for the rest; the request goes on for a while.
    """

    request_id: str
    reason: str = "client disconnected"
    attempt: str = ""
    may_return: bool = False


class RequestsDone(Record, frozen=True, kw_only=True):
    """The answers of these requests, to the end, are with their clients: nothing needs to be kept of them."""

    request_ids: tuple[str, ...]
    attempts: tuple[str, ...]


class StopSequence(Record, frozen=True, kw_only=True):
    """The detokenizer found a stop string and has already sent the terminal reply: stop computing this sequence."""

    request_id: str
    sequence_id: int


class CancelRequest(Record, frozen=True, kw_only=True):
    """An operator ends this request: its client is told so with a :class:`RequestFailed`."""

    request_id: str


class AbortCalls(Record, frozen=True, kw_only=True):
    """A client (the name of its key) ends its calls: those with these ids of answers, or all if there are none."""

    client: str
    ids: tuple[str, ...]
