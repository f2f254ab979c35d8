"""Retries open requests that may be lost, or whose replies may be, each time as a new attempt.

The system sends a retried request's output again from its first token. What the ingress already has is dropped.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection

from pagebus.actors.telemetry.logs import Log
from pagebus.bus.outbox import OUTBOX_LIMIT, Outbox
from pagebus.web.calls.call import OpenRequest
from pagebus.web.ingress.readers import Readers

LOOK_S = 3.0
"""Seconds between checks for silent requests."""


class Retries:
    """Checks the open requests of ``readers``, and retries with ``send`` those that may be lost. While ``outbox`` is
    half full, silence proves nothing."""

    def __init__(self, readers: Readers, send: Callable[[OpenRequest], None], outbox: Outbox, log: Log) -> None:
        self._readers = readers
        self._send = send
        self._outbox = outbox
        self._log = log
        self._looked_s = 0.0

    def retry_all(self) -> None:
        """Retry all requests that have been sent: the bus may have lost them, or replies to them."""
        self._retry([each for each in self._readers.newest.values() if each.is_sent], "the bus may have lost them")

    def retry_silent(self) -> None:
        """Retry the requests that have been silent for long. They may merely be queued, and then keep their place; if
        they were lost, they do not wait for ever."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S or self._outbox.depth > OUTBOX_LIMIT // 2:
            return
        self._looked_s = now_s
        silent = [each for each in self._readers.newest.values() if each.is_sent and each.is_silent(now_s)]
        for request in silent:
            request.be_patient()
        self._retry(silent, "they are silent")

    def _retry(self, requests: Collection[OpenRequest], reason: str) -> None:
        now_s = time.monotonic()
        for request in requests:
            request.retry(now_s, uuid.uuid4().hex)
            self._send(request)
        if requests:
            self._log.warning("open requests are asked for again", requests=len(requests), reason=reason)
