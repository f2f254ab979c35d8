"""Computes one job: parses the line as HTTP would, sends it as a request, and returns the answer as a line."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import count

from msgspec import structs

from pagebus.bus.backoff import Backoff
from pagebus.web.answers.endpoint import Endpoint
from pagebus.web.answers.endpoints import ENDPOINTS, set_details
from pagebus.web.http.errors import ASKED_ELSEWHERE, ApiError, bad_field, too_late
from pagebus.web.http.limits import max_body_bytes
from pagebus.web.ingress.inbox import Inbox
from pagebus.web.jobs.lines import LineError, Result, answered, read_line, refused, unanswered
from pagebus.web.pooling.tasks import check_task
from pagebus.web.requests.lengths import num_bytes
from pagebus.web.requests.parsed_request import ParsedRequest
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.server.context import bus_request_ids

MAX_TRIES = 6
"""Attempts of a request for which the system has no room (429, 503); the pauses between them grow."""
ELSEWHERE_S, MOST_ELSEWHERE_S = 5.0, 60.0
"""Pauses before retrying a job that another actor has requested as well."""


class Worker:
    """Computes lines. ``address`` receives their replies; it is new in every life of the actor."""

    def __init__(self, model: ServedModel, inbox: Inbox, address: str) -> None:
        self._model = model
        self.max_line_bytes = max_body_bytes(model.max_model_len)
        """The largest request of a batch: as large as over HTTP."""
        self._inbox = inbox
        self._address = address
        self._attempts = count()
        """Numbers of attempts, each unique: a job may be begun again, and replies to earlier attempts must not
        count."""
        self.leaving = False
        """Set when the actor ends: work cancelled from then on continues, in its next life or with another actor."""

    def leave(self) -> None:
        """From now on :attr:`leaving` is true."""
        self.leaving = True

    async def run(self, job_id: str, text: str | bytes, priority: int = 0, *, cache_salt: str | None = None) -> Result:
        """The result of a line, an answer or an error. If another actor has begun the same ``job_id``, that request is
        joined: nothing is computed twice."""
        try:
            line = read_line(text)
        except LineError as error:
            return unanswered(job_id, error.custom_id, "invalid_request", str(error))
        endpoint = ENDPOINTS.get(line.url)
        if endpoint is None:
            problem = f"url: must be one of {', '.join(ENDPOINTS)}"
            return unanswered(job_id, line.custom_id, "invalid_url", problem)
        request_id = f"{endpoint.id_prefix}job-{job_id}"
        try:
            parsed = endpoint.parse(line.body, self._model)
            check_task(parsed, self._model)
            if parsed.stream:
                raise bad_field("stream", "a job has no stream; leave it out")
            if parsed.request_id is not None:
                raise bad_field("request_id", "a job is named after its entry; leave it out")
            if parsed.details is not None and parsed.details.embedding is not None and parsed.details.embedding.is_body:
                raise bad_field("encoding_format", "the result of a job is JSON: use float or base64")
            parsed = replace(parsed, priority=priority or parsed.priority, cache_salt=cache_salt or parsed.cache_salt)
            async with asyncio.timeout(parsed.timeout_s):
                body = await self._compute(endpoint, parsed, request_id)
        except ApiError as error:
            return refused(job_id, line.custom_id, request_id, error)
        except TimeoutError:
            return refused(job_id, line.custom_id, request_id, too_late(parsed.timeout_s or 0))
        return answered(job_id, line.custom_id, request_id, body)

    async def _compute(self, endpoint: Endpoint, parsed: ParsedRequest, request_id: str) -> dict[str, object]:
        """Send the request, again and as a new attempt while the system has no room. If another actor took the job
        over, it answers. If this actor has the entry after all, or the other one dies, this one answers."""
        backoff, patience, tries = Backoff(), Backoff(ELSEWHERE_S, MOST_ELSEWHERE_S), 0
        while True:
            try:
                return await self._try(endpoint, parsed, request_id, f"{self._address}#{next(self._attempts)}")
            except ApiError as error:
                is_elsewhere = error.code == ASKED_ELSEWHERE
                tries += not is_elsewhere
                if error.status not in (429, 503) or tries == MAX_TRIES:
                    raise
            await asyncio.sleep((patience if is_elsewhere else backoff).next_s())

    async def _try(self, endpoint: Endpoint, parsed: ParsedRequest, request_id: str, attempt: str) -> dict[str, object]:
        arrived_s = time.time()
        ids = bus_request_ids(request_id, given=False, count=len(parsed.prompts))
        adapter = self._model.adapter_of(parsed.model, pooled=bool(parsed.sampling.pooling))
        messages = parsed.messages_for_bus(ids, self._address, arrived_s, adapter)
        requests = [structs.replace(each, is_job=True, attempt=attempt) for each in messages]
        call = self._inbox.submit(requests, parsed.names_by_prompt, streaming=False, num_bytes=num_bytes(parsed, None))
        try:
            set_details(call, parsed)
            await call.finished()
            return endpoint.answer(call, request_id, int(arrived_s), parsed.model)
        finally:
            self._inbox.close(call, delivered=not self.leaving)
