"""``/v1/files``: uploads for batches, and the results of batches."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from pagebus.web.access.auth import API_KEY
from pagebus.web.answers.answer_schemas import COUNT, OBJECT, TEXT, TIME, array, nullable, record
from pagebus.web.http.errors import ApiError, as_unicode, bad_field, no_room, share_used
from pagebus.web.http.expect import ask_for_body
from pagebus.web.http.limits import MAX_NAME_CHARS
from pagebus.web.http.queries import limit_of
from pagebus.web.routes import About, Route, json_response
from pagebus.web.server.context import CONTEXT, Context
from pagebus.web.storage.files import UPLOAD_TIMEOUT_S, Full, Record, ShareUsed, Store, page, shown

FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
PURPOSES = ("batch", "user_data", "assistants", "evals", "fine-tune", "vision")
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000
CHUNK_BYTES = 2**18
MAX_FIELD_BYTES = 1024
LOOK_BYTES = 2**24
"""Bytes of an upload between checks for room: other uploads go on at the same time."""
MAX_PAGE = 10_000
HEAD_WARNINGS = (BadContentDispositionHeader, BadContentDispositionParam)
NO_FORM = (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError, *HEAD_WARNINGS)
for _warning in HEAD_WARNINGS:  # else what a client wrote would be printed
    warnings.simplefilter("error", _warning)


def store_of(context: Context) -> Store:
    """The store, if this server has one."""
    if context.store is None:
        raise ApiError(404, "This server keeps no files: it was started without --files-dir.", code="no_files")
    return context.store


async def find_file(request: web.Request) -> Record:
    """The file that a path names."""
    file_id = request.match_info["file_id"]
    found = await asyncio.to_thread(store_of(request.app[CONTEXT]).find, file_id, request[API_KEY].name)
    if found is None or found["object"] != "file":
        raise ApiError(404, f"No such File object: {file_id[:100]}", param="id", code="not_found")
    return found


async def upload(request: web.Request) -> web.Response:
    """Upload a file."""
    context, owner = request.app[CONTEXT], request[API_KEY].name
    store = store_of(context)
    check_room = partial(store.check_room, owner, alone=context.keys.has_one)
    if not request.content_type.startswith("multipart/form-data"):
        raise ApiError(415, "The body must be multipart/form-data.", code="unsupported_media_type")
    try:
        with store.upload(owner) as beside:
            await asyncio.to_thread(check_room)
            await ask_for_body(request)
            async with asyncio.timeout(UPLOAD_TIMEOUT_S):
                form = await _read_form(request, check_room, beside, context.settings.max_file_bytes)
            purpose, expires_s = _read_fields(form)
            await asyncio.to_thread(check_room)
            made = await asyncio.to_thread(store.add, beside, form["file"], purpose, owner, expires_s)
    except ShareUsed as share:
        raise share_used(share.what, share.most) from None
    except Full:
        raise no_room() from None
    except TimeoutError:
        raise ApiError(408, f"The file did not arrive within {UPLOAD_TIMEOUT_S:g} s.", code="body_timeout") from None
    return json_response(shown(made))


async def _read_form(
    request: web.Request, check_room: Callable[[], None], beside: Path, max_bytes: int
) -> dict[str, str]:
    """The fields of a form; its file goes to disk, and its name is what ``file`` says."""
    form: dict[str, str] = {}
    try:
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader) or part.name is None or part.name in form:
                raise bad_field("body", "each field of the form may be given once, with a name")
            if part.name not in FIELDS:
                raise bad_field(part.name[:100], "unknown field", code="unknown_parameter")
            if part.name == "file":
                form["file"] = as_unicode(part.filename or "upload")[:MAX_NAME_CHARS]
                await _write(part, check_room, beside, max_bytes)
                continue
            value = bytes(await part.read_chunk(MAX_FIELD_BYTES))
            if not part.at_eof():
                raise bad_field(part.name, f"must have fewer than {MAX_FIELD_BYTES} bytes")
            form[part.name] = value.decode(errors="replace")
    except NO_FORM as error:
        raise ApiError(400, f"The body is not a form: {str(error)[:200]}", code="invalid_form") from None
    return form


async def _write(part: BodyPartReader, check_room: Callable[[], None], beside: Path, max_bytes: int) -> None:
    size = looked = 0
    await asyncio.to_thread(check_room)
    with await asyncio.to_thread(beside.open, "wb") as file:
        while chunk := await part.read_chunk(CHUNK_BYTES):
            size += len(chunk)
            if size > max_bytes:
                raise ApiError(413, f"file: may have at most {max_bytes} bytes", param="file", code="file_too_large")
            if size - looked >= LOOK_BYTES:
                looked = size
                await asyncio.to_thread(check_room)
            await asyncio.to_thread(file.write, chunk)


def _read_fields(form: dict[str, str]) -> tuple[str, int | None]:
    """Purpose, and seconds until the file expires."""
    for name in ("file", "purpose"):
        if name not in form:
            raise bad_field(name, "is required")
    if form["purpose"] not in PURPOSES:
        raise bad_field("purpose", f"must be one of {', '.join(PURPOSES)}")
    if form.get("expires_after[anchor]", "created_at") != "created_at":
        raise bad_field("expires_after.anchor", "must be created_at")
    seconds = form.get("expires_after[seconds]")
    if seconds is None:
        return form["purpose"], None
    if not re.fullmatch(r"[0-9]{1,9}", seconds) or not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        raise bad_field("expires_after.seconds", f"must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}")
    return form["purpose"], int(seconds)


async def list_files(request: web.Request) -> web.Response:
    """The files of the key, the newest first."""
    store, query = store_of(request.app[CONTEXT]), request.query
    found = await asyncio.to_thread(store.all, "file-", request[API_KEY].name)
    if purpose := query.get("purpose"):
        found = [each for each in found if each["purpose"] == purpose]
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise bad_field("order", "must be asc or desc")
    oldest_first, limit = order == "asc", limit_of(request.query, MAX_PAGE, MAX_PAGE)
    if oldest_first:
        found.reverse()
    return json_response(page(found, query.get("after"), limit, oldest_first=oldest_first))


async def show_file(request: web.Request) -> web.Response:
    """The metadata of a file."""
    return json_response(shown(await find_file(request)))


async def read_file(request: web.Request) -> web.StreamResponse:
    """The bytes of a file."""
    found = await find_file(request)
    path = store_of(request.app[CONTEXT]).data(found["id"])
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})


async def delete_file(request: web.Request) -> web.Response:
    """Delete a file."""
    found = await find_file(request)
    await asyncio.to_thread(store_of(request.app[CONTEXT]).delete, found["id"])
    return json_response({"id": found["id"], "object": "file", "deleted": True})


FILE = record(id=TEXT, object={"const": "file"}, bytes=COUNT, created_at=TIME, filename=TEXT, purpose=TEXT,
              expires_at=nullable(TIME))  # fmt: skip
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": list(PURPOSES)}},
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
PAGE: dict[str, Any] = {"after": TEXT, "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}}
LIST: dict[str, Any] = record(object={"const": "list"}, data=array(OBJECT), has_more={"type": "boolean"})
ABOUT = About(tag="Files and batches", answer=FILE)

ROUTES = (
    Route("POST", "/v1/files", "files_upload", upload,
          About(tag=ABOUT.tag, answer=FILE, body=FORM, body_type="multipart/form-data")),
    Route("GET", "/v1/files", "files", list_files,
          About(tag=ABOUT.tag, answer=LIST, query={**PAGE, "order": {"enum": ["asc", "desc"]}, "purpose": TEXT})),
    Route("GET", "/v1/files/{file_id}", "file", show_file, ABOUT),
    Route("DELETE", "/v1/files/{file_id}", "file_delete", delete_file,
          About(tag=ABOUT.tag, answer=record(id=TEXT, deleted={"const": True}))),
    Route("GET", "/v1/files/{file_id}/content", "file_content", read_file,
          About(tag=ABOUT.tag, answer_types=("application/octet-stream",))),
)  # fmt: skip
