"""Errors in the shape that clients of OpenAI and vLLM expect, ``{"error": {"message", "type", "param", "code",
"reason"}}``.

``code`` repeats the HTTP status, as in vLLM. ``reason`` names the problem in one word, for programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from aiohttp import web

from pagebus.bus.messages import RequestFailed

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
REASONS = {
    400: "invalid_value",
    405: "method_not_allowed",
    413: "too_many_bytes",
    417: "unsupported_expectation",
    429: "too_many_requests",
    500: "internal_error",
    503: "unavailable",
}
"""The reason where nothing but the status is known."""


MAX_SHOWN = 64
"""Characters of a name that was given, of which a message repeats no more."""
ASKED_ELSEWHERE = "asked_elsewhere"
"""The reason of an attempt that came to nothing because another one, at another address, goes on."""


class ApiError(Exception):
    """An error whose text a client may read. ``param`` names the field at fault, ``code`` is the
    reason, for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        overloaded: str = "",
    ) -> None:
        """``overloaded``: the quantity that exceeded a limit."""
        super().__init__(message)
        self.status = status
        self.message = as_unicode(message)
        self.type = type or TYPES.get(status, TYPES[400] if status < 500 else TYPES[500])
        self.param = None if param is None else as_unicode(param)
        self.code = code
        self.headers = dict(headers or {})
        self.overloaded = overloaded

    def rename(self, param: str | None, message: str) -> None:
        """Name the field at fault as the client does, in the ``message`` too."""
        self.param, self.message = param, message

    def body(self) -> dict[str, Any]:
        """The JSON object a client gets, as a body or as an event of a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return {"error": {**error, "reason": self.code}}

    def response(self, body: Mapping[str, Any] | None = None) -> web.Response:
        """The whole response. ``body``: in the shape of another API."""
        content = orjson.dumps(self.body() if body is None else body)
        return web.Response(status=self.status, body=content, content_type="application/json", headers=self.headers)


def as_unicode(text: str) -> str:
    """With question marks for what came as bytes that are no UTF-8, which no JSON can hold."""
    return text.encode("utf-8", "replace").decode()


def bad_field(param: str, problem: str, *, code: str = "invalid_value") -> ApiError:
    """400 for one field; the message starts with its name."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def not_supported(param: str, neutral: Sequence[Any] = ()) -> ApiError:
    """400 for a field that is not served, but for its ``neutral`` values, which ask for nothing."""
    instead = " or ".join(orjson.dumps(value).decode() for value in neutral)
    problem = "not supported; leave it out" + (f" or give {instead}" if instead else "")
    return bad_field(param, problem, code="unsupported_parameter")


def unsupported_type(path: str, given: object) -> ApiError:
    """400 for what was given at ``path``: an object whose type is not served, or no object with a type at all."""
    kind = given.get("type") if isinstance(given, dict) else None
    problem = f"{kind[:MAX_SHOWN]!r} is not supported" if isinstance(kind, str) else "is required"
    return bad_field(f"{path}.type", problem, code="unsupported_parameter")


def unknown_field(param: str, near: str | None = None, *, may_allow: bool = False) -> ApiError:
    """400 for a field that nobody knows. ``near``: one with such a name. ``may_allow``: a server may ignore them."""
    do = f"did you mean {near}?" if near else "leave it out"
    if may_allow and not near:
        do += ", or have the server ignore such fields (--allow-unknown-fields)"
    return bad_field(param, f"unknown field; {do}", code="unknown_parameter")


def model_not_found(model: str) -> ApiError:
    """404 as OpenAI words it."""
    shown = model if len(model) <= 200 else model[:200] + "..."
    text = f"The model `{shown}` does not exist. GET /v1/models lists those that do."
    return ApiError(404, text, param="model", code="model_not_found")


def unavailable(message: str, *, retry_after_s: int = 1) -> ApiError:
    """503 that says when to come again."""
    return ApiError(503, message, code="unavailable", headers={"Retry-After": str(retry_after_s)})


def bus_away() -> ApiError:
    """503: nothing can be asked of the other actors."""
    return unavailable("The server does not reach its message bus (Redis), or too slowly; please try again later.")


def overloaded(what: str, limit: int, retry_after_s: int) -> ApiError:
    """429: as much is under way as may be."""
    message = f"Too many {what} are under way (at most {limit}); try again in {retry_after_s} s."
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, code="too_many_requests", headers=headers, overloaded=what)


def share_used(what: str, most: int) -> ApiError:
    """429 with OpenAI's word for it: the key has its share of what all keys have together, until it gives some back.
    Clients that repeat a 429 by themselves are told not to."""
    message = f"This key has its share of {what}: at most {most}, half of what other keys leave. Delete some first."
    return ApiError(429, message, code="insufficient_quota", headers={"x-should-retry": "false"})


def no_room() -> ApiError:
    """507: files have taken the room that they may, or all that the disk has."""
    return ApiError(507, "The server has no room for more files; delete some.", code="no_room")


def too_late(timeout_s: float) -> ApiError:
    """408: the client's own ``timeout`` is over. Clients that repeat a 408 by themselves are told not to."""
    message = f"timeout: the answer was not complete within {timeout_s:g} s."
    return ApiError(408, message, param="timeout", code="timeout", headers={"x-should-retry": "false"})


def aborted() -> ApiError:
    """409: somebody with the client's key has asked for the end of it, so repeating it is not what they want."""
    text = "The request was aborted, as /abort_requests was asked to."
    return ApiError(409, text, code="request_cancelled", headers={"x-should-retry": "false"})


def internal(message: str = "Internal error; the server's log has the request id.") -> ApiError:
    """500 with a fixed text: what went wrong inside is for the log."""
    return ApiError(500, message, code="internal_error")


def from_failure(failure: RequestFailed) -> ApiError:
    """What a tokenizer, scheduler or detokenizer said about a request that cannot go on."""
    status = failure.status if 400 <= failure.status <= 599 else 500
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    code = ASKED_ELSEWHERE if failure.attempt else REASONS.get(status)
    if status == 400 and is_too_long(failure):
        code = "context_length_exceeded"
    return ApiError(status, failure.message, param=failure.param, code=code, headers=headers)


def is_too_long(failure: RequestFailed) -> bool:
    """Whether a prompt did not fit the context: OpenAI has a code of its own for that."""
    return any(words in failure.message for words in ("maximum context length", "context holds"))


def from_http(error: web.HTTPException) -> ApiError:
    """aiohttp's own errors (wrong method, body too large) in our shape."""
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    texts = {
        405: f"This route does not take that method; it takes {headers.get('Allow', '').replace(',', ', ')}.",
        413: "The request body is too large.",
        417: "The header Expect is not supported, but for 100-continue.",
    }
    text = texts.get(error.status, error.reason)
    return ApiError(error.status, text, code=REASONS.get(error.status), headers=headers)
