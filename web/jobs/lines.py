"""Lines of OpenAI's batch format: requests in, results out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from pagebus.web.http.errors import ApiError
from pagebus.web.http.fields import type_name
from pagebus.web.http.limits import brackets_problem
from pagebus.web.requests.openai import check_nesting

MAX_CUSTOM_ID_CHARS = 512
LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})


class LineError(Exception):
    """A line that is not a request. ``custom_id`` is its own, if that can be read."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Line:
    """``{"custom_id": ..., "method": "POST", "url": "/v1/...", "body": {...}}``."""

    custom_id: str
    url: str
    body: dict[str, Any]


def size_problem(text: bytes, max_bytes: int) -> str:
    """Why a line is too large to be parsed at all, as a body over HTTP would be; "" if it is not."""
    if len(text) > max_bytes:
        return f"A request may have at most {max_bytes} bytes."
    problem = brackets_problem(text, max_bytes)
    return problem and f"A request {problem}"


def read_line(text: str | bytes) -> Line:
    """Parse the request of one line.

    Raises:
        LineError: it is none.
    """
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise LineError(f"The request is not valid JSON: {error}") from None
    if type(data) is not dict:
        raise LineError(f"The request must be a JSON object, got {type_name(data)}.")
    try:
        check_nesting(data, text)
    except ApiError as error:
        raise LineError(error.message) from None
    custom_id = data.get("custom_id")
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise LineError(f"custom_id: must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters")
    if unknown := data.keys() - LINE_FIELDS:
        raise LineError(f"{min(unknown)[:100]}: unknown field", custom_id)
    if data.get("method", "POST") != "POST":
        raise LineError("method: must be POST", custom_id)
    url, body = data.get("url"), data.get("body")
    if type(url) is not str:
        raise LineError("url: must be a string such as /v1/chat/completions", custom_id)
    if type(body) is not dict:
        raise LineError(f"body: must be an object, got {type_name(body)}", custom_id)
    return Line(custom_id, url, body)


def custom_id_of(text: str | bytes) -> str | None:
    """The ``custom_id`` of a line, if it can be read."""
    try:
        return read_line(text).custom_id
    except LineError as error:
        return error.custom_id


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the output. ``failed``: it is an error, of the client or the server."""

    custom_id: str | None
    line: dict[str, Any]
    failed: bool

    def text(self) -> str:
        return orjson.dumps(self.line).decode()


def answered(job_id: str, custom_id: str, request_id: str, body: dict[str, Any]) -> Result:
    """The request was computed."""
    return _result(job_id, custom_id, {"status_code": 200, "request_id": request_id, "body": body}, None)


def refused(job_id: str, custom_id: str, request_id: str, error: ApiError) -> Result:
    """The line of a request that was rejected or failed, with the error that HTTP would have returned."""
    response = {"status_code": error.status, "request_id": request_id, "body": error.body()}
    return _result(job_id, custom_id, response, None, failed=True)


def unanswered(job_id: str, custom_id: str | None, code: str, message: str) -> Result:
    """The line of an invalid request, or of one that was not computed (cancelled, expired)."""
    return _result(job_id, custom_id, None, {"code": code, "message": message}, failed=True)


def cancelled(job_id: str, text: str | bytes) -> Result:
    """The client no longer wants it."""
    return unanswered(job_id, custom_id_of(text), "batch_cancelled", "The batch was cancelled before this was done.")


def _result(
    job_id: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None, *,
    failed: bool = False,
) -> Result:  # fmt: skip
    line = {"id": f"batch_req_{job_id}", "custom_id": custom_id, "response": response, "error": error}
    return Result(custom_id, line, failed)
