"""``POST /abort_requests``, as vLLM has it: a client's own calls are ended, by the ids of their answers or all."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from web.answer_schemas import COUNT, record
from web.context import API_KEY, CONTEXT
from web.errors import aborted, bad_field
from web.fields import Fields
from web.limits import MAX_ABORTS, MAX_NAME_CHARS
from web.model import ServedModel
from web.routes import About, Route, json_response
from web.schemas import parse_json

_ID = {"type": "string", "maxLength": MAX_NAME_CHARS}


def parse_abort(data: dict[str, Any], model: ServedModel) -> frozenset[str]:
    """The ids that are named; none: all are meant."""
    fields = Fields(data)
    ids = fields.array("request_ids", max_items=MAX_ABORTS, items=_ID) or ()
    for index, each in enumerate(ids):
        if type(each) is not str or len(each) > MAX_NAME_CHARS:
            raise bad_field(f"request_ids[{index}]", f"must be a string of at most {MAX_NAME_CHARS} characters")
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    return frozenset(ids)


async def abort_requests(request: web.Request) -> web.Response:
    """End calls of this key that this ingress has under way: those with `request_ids`, or all.

    An id is the one that the answer carries. Whoever waits for such a call gets a 409, or an error event.
    """
    context, key = request.app[CONTEXT], request[API_KEY]
    wanted = parse_abort(parse_json(await context.bodies.read(request)), context.model)
    own = {each.call for each in context.inbox.open_requests() if each.message and each.message.client == key.name}
    ended = [call for call in own if not wanted or call.public_id in wanted]
    for call in ended:
        context.inbox.end(call, aborted())
    return json_response({"status": "aborted", "aborted": len(ended)})


ROUTES = (
    Route("POST", "/abort_requests", "abort_requests", abort_requests,
          About(tag="Generation", parse=parse_abort, examples={"one": {"request_ids": ["chatcmpl-0123"]}, "all": {}},
                answer=record(status={"const": "aborted"}, aborted=COUNT))),
)  # fmt: skip
