"""``POST /abort_requests``, as in vLLM: ends a client's own calls, by the ids of their answers or all of them."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagebus.web.access.auth import API_KEY
from pagebus.web.answers.answer_schemas import COUNT, record
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields
from pagebus.web.http.limits import MAX_ABORTS, MAX_NAME_CHARS
from pagebus.web.requests.openai import parse_json
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route, json_response
from pagebus.web.server.context import CONTEXT

_ID = {"type": "string", "maxLength": MAX_NAME_CHARS}


def parse_abort(data: dict[str, Any], model: ServedModel) -> frozenset[str]:
    """The ids of calls to abort; empty: all calls."""
    fields = Fields(data)
    ids = fields.array("request_ids", max_items=MAX_ABORTS, items=_ID) or ()
    for index, each in enumerate(ids):
        if type(each) is not str or len(each) > MAX_NAME_CHARS:
            raise bad_field(f"request_ids[{index}]", f"must be a string of at most {MAX_NAME_CHARS} characters")
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    return frozenset(ids)


async def abort_requests(request: web.Request) -> web.Response:
    """Abort calls of this key: those with `request_ids`, or all.

    An id is the one that the answer carries. Whoever waits for such a call gets a 409, or an error event. Other
    ingresses are told; `aborted` counts what has ended at this one.
    """
    context, key = request.app[CONTEXT], request[API_KEY]
    wanted = parse_abort(parse_json(await context.bodies.read(request)), context.model)
    context.inbox.abort_at(context.other_ingresses(), key.name, sorted(wanted))
    return json_response({"status": "aborted", "aborted": context.inbox.abort(key.name, wanted)})


ROUTES = (
    Route("POST", "/abort_requests", "abort_requests", abort_requests,
          About(tag="Generation", parse=parse_abort, examples={"one": {"request_ids": ["chatcmpl-0123"]}, "all": {}},
                answer=record(status={"const": "aborted"}, aborted=COUNT))),
)  # fmt: skip
