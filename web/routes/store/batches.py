"""``/v1/batches``: files of requests that the jobs actors process."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pagebus.bus.messages import BatchQueued
from pagebus.web.access.auth import API_KEY, ApiKey
from pagebus.web.answers.answer_schemas import COUNT, TEXT, TIME, nullable, record
from pagebus.web.answers.endpoints import ENDPOINTS
from pagebus.web.http.errors import ApiError, bad_field, overloaded
from pagebus.web.http.fields import Fields
from pagebus.web.http.queries import limit_of
from pagebus.web.requests.openai import METADATA_RULE, is_metadata, parse_json
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route, json_response
from pagebus.web.routes.store.files import LIST, MAX_EXPIRY_S, MIN_EXPIRY_S, store_of
from pagebus.web.server.context import CONTEXT
from pagebus.web.storage.files import OVER, Record, Store, new_id, page, shown

WINDOW_S = 86400
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
MAX_PAGE = 100
RETRY_AFTER_S = 60
"""Seconds after which a client with too many batches under way may retry."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The body of ``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    metadata: dict[str, str] | None
    output_expires_s: int | None


def parse_batch(data: dict[str, Any], model: ServedModel) -> Wanted:
    """Read it."""
    fields = Fields(data)
    file_id = fields.string("input_file_id", None)
    endpoint = fields.string("endpoint", None)
    window = fields.string("completion_window", None)
    for name, value in (("input_file_id", file_id), ("endpoint", endpoint), ("completion_window", window)):
        if value is None:
            raise bad_field(name, "is required")
    if endpoint not in ENDPOINTS:
        raise bad_field("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
    if window != "24h":
        raise bad_field("completion_window", "must be 24h")
    metadata = fields.object("metadata")
    if metadata is not None and not is_metadata(metadata):
        raise bad_field("metadata", METADATA_RULE)
    expires_s = None
    if (given := fields.object("output_expires_after")) is not None:
        expiry = Fields(given, "output_expires_after")
        if expiry.string("anchor", "created_at") != "created_at":
            raise bad_field("output_expires_after.anchor", "must be created_at")
        expires_s = expiry.integer("seconds", None, MIN_EXPIRY_S, MAX_EXPIRY_S)
        expiry.finish({})
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    return Wanted(str(file_id), str(endpoint), metadata, expires_s)


async def create_batch(request: web.Request) -> web.Response:
    """Queue the requests of a file. They are computed as jobs, behind everything interactive."""
    context, key = request.app[CONTEXT], request[API_KEY]
    store = store_of(context)
    wanted = parse_batch(parse_json(await context.bodies.read(request)), context.model)
    file = await asyncio.to_thread(store.find, wanted.input_file_id, key.name)
    if file is None or file.get("purpose") != "batch":  # it may be a batch
        raise bad_field("input_file_id", "there is no such file with the purpose batch")
    batch = new_batch(wanted, key, context.settings.name)
    async with store.making:
        most = context.settings.max_batches
        if await asyncio.to_thread(store.num_under_way, key.name) >= most:
            raise overloaded("batches", most, RETRY_AFTER_S)
        await context.queue_batch(BatchQueued(batch_id=batch["id"], traceparent=traceparent_of(request)))
        await asyncio.to_thread(store.save, batch)  # last: a batch that is seen will be worked on
        await asyncio.to_thread(store.forget_ended, key.name)
    return json_response(shown(batch))


def traceparent_of(request: web.Request) -> str:
    """The client's span, if it sent one."""
    told = request.headers.get("traceparent", "")
    return told if TRACEPARENT.fullmatch(told) else ""


def new_batch(wanted: Wanted, key: ApiKey, deployment: str) -> Record:
    """The record of a new batch."""
    now = int(time.time())
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": new_id("batch_"),
        "object": "batch",
        "endpoint": wanted.endpoint,
        "errors": None,
        "input_file_id": wanted.input_file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **{f"{name}_at": None for name in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": wanted.metadata,
        "model": None,
        "usage": None,
        "owner": key.name,
        "weight": key.weight,
        "cache_salt": key.salted(None) if key.private_cache else None,
        "output_expires_s": wanted.output_expires_s,
        "deployment": deployment,
    }


def as_of_now(store: Store, batch: Record) -> Record:
    """The record of a batch as of now: a cancelled batch is ``cancelling`` even before its jobs actor notices."""
    if batch["status"] not in OVER and (at := store.cancelled_at(batch["id"])) is not None:
        return {**batch, "status": "cancelling", "cancelling_at": at}
    return batch


async def _find(request: web.Request) -> tuple[Store, Record]:
    store, batch_id = store_of(request.app[CONTEXT]), request.match_info["batch_id"]
    found = await asyncio.to_thread(store.find, batch_id, request[API_KEY].name)
    if found is None or found["object"] != "batch":
        raise ApiError(404, f"No batch found with id '{batch_id[:100]}'.", param="id", code="not_found")
    return store, found


async def show_batch(request: web.Request) -> web.Response:
    """The state of a batch."""
    store, batch = await _find(request)
    return json_response(shown(as_of_now(store, batch)))


async def cancel_batch(request: web.Request) -> web.Response:
    """Cancel a batch; finished results stay, and the rest is listed as cancelled."""
    store, batch = await _find(request)
    if batch["status"] in OVER:
        raise ApiError(409, f"The batch is {batch['status']} already.", code="batch_over")
    await asyncio.to_thread(store.cancel, batch["id"])
    return json_response(shown(as_of_now(store, batch)))


async def list_batches(request: web.Request) -> web.Response:
    """The batches of the key, the newest first."""
    store = store_of(request.app[CONTEXT])
    found = await asyncio.to_thread(store.all, "batch_", request[API_KEY].name)
    found = [as_of_now(store, batch) for batch in found]
    return json_response(page(found, request.query.get("after"), limit_of(request.query, 20, MAX_PAGE)))


BATCH = record(id=TEXT, object={"const": "batch"}, endpoint=TEXT, input_file_id=TEXT, status=TEXT, created_at=TIME,
               output_file_id=nullable(TEXT), error_file_id=nullable(TEXT),
               request_counts=record(total=COUNT, completed=COUNT, failed=COUNT))  # fmt: skip
TAG = "Files and batches"
ABOUT = About(tag=TAG, answer=BATCH)
EXAMPLE = {
    "input_file_id": "file-0123456789abcdef01234567",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    "metadata": {"for": "the report"},
    "output_expires_after": {"anchor": "created_at", "seconds": 86400},
}
ROUTES = (
    Route("POST", "/v1/batches", "batches_create", create_batch,
          About(tag=TAG, answer=BATCH, parse=parse_batch, examples={"all": EXAMPLE})),
    Route("GET", "/v1/batches", "batches", list_batches,
          About(tag=TAG, answer=LIST, query={"after": TEXT, "limit": {"type": "integer", "minimum": 1,
                                                                      "maximum": MAX_PAGE}})),
    Route("GET", "/v1/batches/{batch_id}", "batch", show_batch, ABOUT),
    Route("POST", "/v1/batches/{batch_id}/cancel", "batch_cancel", cancel_batch, ABOUT),
)  # fmt: skip
