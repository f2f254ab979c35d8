"""What becomes of requests that are under way: ingresses, detokenizers, operators -> scheduler, or other ingresses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """The client of ``request_id`` is gone: free everything it holds, send nothing more.

    ``attempt`` is the one that the client left: a request that was asked for again since goes on.
    ``may_return``: the client said that it may come back for the rest; the request goes on for a while.
    """

    request_id: str
    reason: str = "client disconnected"
    attempt: str = ""
    may_return: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsDone:
    """The answers of these requests, to the end, are with their clients: nothing needs to be kept of them."""

    request_ids: tuple[str, ...]
    attempts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSequence:
    """The detokenizer found a stop string and has already sent the terminal reply: stop computing this sequence."""

    request_id: str
    sequence_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """An operator ends this request: its client is told so with a :class:`RequestFailed`."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCalls:
    """A client (the name of its key) ends its calls: those with these ids of answers, or all if there are none."""

    client: str
    ids: tuple[str, ...]
