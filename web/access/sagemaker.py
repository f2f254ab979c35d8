"""SageMaker's stateful sessions at ``/invocations``: a client opens one, names it in its requests, and closes it.

Balancers keep a session's requests together by its id. Here any ingress answers any request, so a session is no more
than a name on the bus that lasts for a while (``--sagemaker-session-s``), of the key that has opened it.
"""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from pagebus.bus.contract import Bus
from pagebus.web.http.errors import ApiError, bad_field
from pagebus.web.http.fields import Fields

SESSION, NEW, CLOSED = (f"X-Amzn-SageMaker-{name}-Id" for name in ("Session", "New-Session", "Closed-Session"))
MAX_ID_CHARS = 64
KINDS = NEW_SESSION, CLOSE = "NEW_SESSION", "CLOSE"


def parse_session(data: dict[str, Any]) -> str:
    """What a body asks for: one of :data:`KINDS`."""
    fields = Fields(data)
    kind = fields.take("requestType", {"enum": list(KINDS)})
    fields.finish({})
    if kind not in KINDS:
        raise bad_field("requestType", "is required" if kind is None else f"must be {' or '.join(KINDS)}")
    return str(kind)


class SessionAsked(Exception):
    """A body that opens or closes a session, and is for no endpoint."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__("a session is asked for")
        self.data = data


class Sessions:
    """``ttl_s``: lifetime of a session in seconds; None: sessions are disabled."""

    def __init__(self, bus: Bus, ttl_s: float | None) -> None:
        self._bus = bus
        self._ttl_s = ttl_s

    async def check(self, given: str | None, client: str) -> None:
        """Reject a request whose header names an unknown session.

        Raises:
            ApiError: 400.
        """
        if given is not None:
            self._limit_s()
            await self._find(given, client)

    async def answer(self, data: dict[str, Any], given: str | None, client: str) -> web.Response:
        """The answer to a body that opens a session, or closes the one that the header names.

        Raises:
            ApiError: 400, there are no sessions, or there is not this one.
        """
        ttl_s = self._limit_s()
        if parse_session(data) == NEW_SESSION:
            return await self._open(ttl_s, client)
        name = await self._find(given, client)
        await self._bus.delete_state(name)
        return web.Response(text=f"Session {given} closed", headers={CLOSED: str(given)})

    def _limit_s(self) -> float:
        if self._ttl_s is None:
            raise ApiError(400, "This server was started without --sagemaker-session-s.", code="not_enabled")
        return self._ttl_s

    async def _open(self, ttl_s: float, client: str) -> web.Response:
        session_id = str(uuid.uuid4())
        await self._bus.put_state(_state(session_id), {"client": client}, ttl_s=ttl_s)
        until = datetime.fromtimestamp(time.time() + ttl_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return web.Response(text=f"Session {session_id} created", headers={NEW: f"{session_id}; Expires={until}"})

    async def _find(self, session_id: str | None, client: str) -> str:
        """The name of a session's state on the bus."""
        name = _state((session_id or "")[:MAX_ID_CHARS])
        (state,) = await self._bus.get_state(name)
        if state is None or state.get("client") != client:
            raise ApiError(400, "There is no such session, or it has expired.", param=SESSION, code="session_not_found")
        return name


def _state(session_id: str) -> str:
    return f"session:{session_id}"
