"""``POST /abort_requests``, as in vLLM: ends a client's own calls, by the ids of their answers or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiohttp import web

from pagebus.web.access.auth import API_KEY
from pagebus.web.answers.answer_schemas import COUNT, record
from pagebus.web.answers.resume import request_id_of_key
from pagebus.web.http.errors import bad_field
from pagebus.web.http.fields import Fields
from pagebus.web.http.limits import MAX_ABORTS, MAX_NAME_CHARS
from pagebus.web.requests.openai import parse_json
from pagebus.web.requests.served_model import ServedModel
from pagebus.web.routes import About, Route, json_response
from pagebus.web.server.context import CONTEXT

_ID = {"type": "string", "maxLength": MAX_NAME_CHARS}
PREFIXES = ("cmpl-", "chatcmpl-", "msg_", "generate-tokens-")
"""Of the ids of answers that are generated."""


class Wanted(NamedTuple):
    """The calls to abort, by the ids of their answers and by their keys; of neither: all calls."""

    ids: Sequence[str]
    keys: Sequence[str]

    def all_ids(self, owner: str) -> frozenset[str]:
        """All ids that these calls of an owner may have."""
        of_keys = [request_id_of_key(key, owner) for key in self.keys]
        return frozenset([*self.ids, *(prefix + each for each in of_keys for prefix in PREFIXES)])


def parse_abort(data: dict[str, Any], model: ServedModel) -> Wanted:
    """What to abort."""
    fields = Fields(data)
    wanted = Wanted(_names(fields, "request_ids"), _names(fields, "idempotency_keys"))
    fields.finish({}, allow_unknown=model.allow_unknown_fields)
    return wanted


def _names(fields: Fields, name: str) -> Sequence[str]:
    names = fields.array(name, max_items=MAX_ABORTS, items=_ID) or ()
    for index, each in enumerate(names):
        if type(each) is not str or len(each) > MAX_NAME_CHARS:
            raise bad_field(f"{name}[{index}]", f"must be a string of at most {MAX_NAME_CHARS} characters")
    return names


async def abort_requests(request: web.Request) -> web.Response:
    """Abort calls of this key: those with `request_ids`, those that were sent with `idempotency_keys`, or all.

    An id is the one that the answer carries. Before it comes, a call can be named by its `Idempotency-Key`. Whoever
    waits for such a call gets a 409, or an error event. Other ingresses are told; `aborted` counts what has ended at
    this one.
    """
    context, key = request.app[CONTEXT], request[API_KEY]
    wanted = parse_abort(parse_json(await context.bodies.read(request)), context.model).all_ids(key.name)
    context.inbox.abort_at(context.other_ingresses(), key.name, sorted(wanted))
    return json_response({"status": "aborted", "aborted": context.inbox.abort(key.name, wanted)})


EXAMPLES: dict[str, dict[str, Any]] = {
    "one": {"request_ids": ["chatcmpl-0123"]},
    "not answered yet": {"idempotency_keys": ["0123"]},
    "all": {},
}
ROUTES = (
    Route("POST", "/abort_requests", "abort_requests", abort_requests,
          About(tag="Generation", parse=parse_abort, examples=EXAMPLES,
                answer=record(status={"const": "aborted"}, aborted=COUNT))),
)  # fmt: skip
