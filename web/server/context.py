"""The context that every route receives, stored on the aiohttp application."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pagebus.actors.settings import Settings
from pagebus.actors.telemetry.logs import Log
from pagebus.bus.messages import BatchQueued
from pagebus.bus.streams import address_of
from pagebus.web.access.admission import Admission
from pagebus.web.access.auth import KeyRing
from pagebus.web.access.bodies import Bodies
from pagebus.web.access.cors import Cors
from pagebus.web.access.hosts import Hosts
from pagebus.web.access.sagemaker import Sessions
from pagebus.web.answers.writing import Streams
from pagebus.web.http.errors import bus_away, unavailable
from pagebus.web.http.limits import ID_CHARS, MAX_ID_CHARS
from pagebus.web.ingress.adapter_registry import AdapterRegistry
from pagebus.web.ingress.inbox import Inbox
from pagebus.web.ingress.membership import Membership
from pagebus.web.ingress.operations import Operations
from pagebus.web.ingress.request_log import RequestLog
from pagebus.web.observatory.observatory import Observatory
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.storage.files import Store
from pagebus.web.storage.responses import Responses
from pagebus.web.telemetry.metrics import IngressMetrics

if TYPE_CHECKING:
    from pagebus.web.telemetry.tracing import Tracing


@dataclass(slots=True, kw_only=True)
class Context:
    """The parts of one ingress. Replies come to ``address``. ``draining()`` is true once it takes nothing
    new; ``bus_trouble()`` says why the bus takes no writes, if so."""

    settings: Settings
    address: str
    version: str
    model: ServedModel
    inbox: Inbox
    membership: Membership
    metrics: IngressMetrics
    streams: Streams
    keys: KeyRing
    admission: Admission
    bodies: Bodies
    observatory: Observatory
    cors: Cors
    hosts: Hosts
    operations: Operations
    sessions: Sessions
    adapters: AdapterRegistry
    log: Log
    draining: Callable[[], bool]
    bus_trouble: Callable[[], str]
    render_metrics: Callable[[], Awaitable[str]]
    read_load: Callable[[], Awaitable[Mapping[str, float]]]
    queue_batch: Callable[[BatchQueued], Awaitable[None]]
    """Has a jobs actor work on the batch, once its record is there."""
    responses: Responses
    store: Store | None = None
    """Files and batches, if this server keeps any."""
    tracing: Tracing | None = None
    request_log: RequestLog | None = None

    def missing(self) -> tuple[str, ...]:
        """Why a new request would not be answered now; empty if it would."""
        if self.draining():
            return ("draining",)
        return ("bus",) if self.bus_trouble() else self.membership.missing()

    def other_ingresses(self) -> Sequence[str]:
        """Where those get their replies that live beside this one."""
        there = [address_of(lease.name, lease.epoch) for lease in self.membership.leases if lease.kind == "ingress"]
        return [address for address in there if address != self.address]

    def check_ready(self) -> None:
        """503 unless a request would be answered."""
        missing = self.missing()
        if missing == ("draining",):
            raise unavailable("The server is shutting down.")
        if missing == ("bus",):
            raise bus_away()
        if missing:
            raise unavailable(f"The server is not ready: no {', no '.join(missing)}. GET /health says how far it is.")


CONTEXT = web.AppKey("context", Context)
REQUEST_ID = web.RequestKey("request_id", str)
REQUEST_ID_GIVEN = web.RequestKey("request_id_given", bool)
BUS_IDS = web.RequestKey("bus_ids", Sequence)
"""The ids of what became of it on the bus, once it has been sent."""


def logged_as(request: web.Request) -> dict[str, Any]:
    """How lines of the log name an HTTP request: by the id that other actors log, once there is one. Of several there
    is the first, and their number. ``X-Request-Id`` stands beside it if it is no part of it."""
    ids = request.get(BUS_IDS) or [request[REQUEST_ID]]
    named: dict[str, Any] = {"request_id": ids[0]}
    if len(ids) > 1:
        named["requests"] = len(ids)
    if request[REQUEST_ID] not in ids[0]:
        named["x_request_id"] = request[REQUEST_ID]
    return named


def request_id_of(headers: Mapping[str, str]) -> tuple[str, bool]:
    """The client's ``X-Request-Id`` if it is sane, else a new one; and whether it is the client's."""
    given = headers.get("X-Request-Id", "")
    if 0 < len(given) <= MAX_ID_CHARS and ID_CHARS.issuperset(given):
        return given, True
    return uuid.uuid4().hex, False


def bus_request_ids(public_id: str, *, given: bool, count: int) -> Sequence[str]:
    """Ids of the ``count`` requests of a call on the bus: unique even if clients send the same id twice."""
    base = f"{public_id}-{uuid.uuid4().hex[:12]}" if given else public_id
    return [base] if count == 1 else [f"{base}-{index}" for index in range(count)]
