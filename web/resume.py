"""Answers that a client may come back for: ``Idempotency-Key``, event ids, ``Last-Event-ID``.

A request with a key has an id that follows from the key, so the same request again, at any ingress, joins the one that
is under way, or gets what it has become. The events of its stream say how much the client has after them; a client that
lost the connection sends the last such id along and gets the rest. Nothing of this is kept at the ingress.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from web.calls import Choice
from web.errors import ApiError
from web.fields import Schema

MAX_KEY_CHARS = 255
RESUMPTION_HEADERS: dict[str, Schema] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
    "Last-Event-ID": {
        "type": "string",
        "description": "The id of the last event that came: the stream goes on after it.",
    },
}
_SEEN = re.compile(r"[0-9]{1,9}\.[0-9]{1,9}\.?(,[0-9]{1,9}\.[0-9]{1,9}\.?)*")


@dataclass(frozen=True, slots=True)
class Resumption:
    """``request_id``: the public id without its prefix. ``attempt``: unique. ``seen``: tokens and characters that the
    client has of each choice, and whether it has its end; None: it begins."""

    request_id: str
    attempt: str
    seen: tuple[tuple[int, int, bool], ...] | None

    def seen_of(self, num_choices: int) -> Sequence[tuple[int, int, bool]] | None:
        """What the client has of its ``num_choices`` choices.

        Raises:
            ApiError: 400, its last event is not one of such a request.
        """
        if self.seen is not None and len(self.seen) != num_choices:
            raise _bad_header("Last-Event-ID", f"it speaks of {len(self.seen)} choices, the request of {num_choices}")
        return self.seen


def read_resumption(headers: Mapping[str, str], owner: str) -> Resumption | None:
    """What the headers of a request say; None if it has no ``Idempotency-Key``. ``owner``: the name of its API key, of
    whose requests alone it can be one.

    Raises:
        ApiError: 400, they make no sense.
    """
    key, last = headers.get("Idempotency-Key"), headers.get("Last-Event-ID")
    if key is None:
        if last is not None:
            raise _bad_header("Last-Event-ID", "only a request with an Idempotency-Key can be resumed")
        return None
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise _bad_header("Idempotency-Key", f"it must have 1 to {MAX_KEY_CHARS} characters")
    digest = hashlib.blake2b(f"{owner}\0{key}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
    return Resumption(digest, uuid.uuid4().hex, None if last is None else _read_seen(last))


def _read_seen(last: str) -> tuple[tuple[int, int, bool], ...]:
    if not _SEEN.fullmatch(last):
        raise _bad_header("Last-Event-ID", "it is not the id of an event of this server")
    choices = (choice.split(".") for choice in last.split(","))
    return tuple((int(tokens), int(chars), bool(ended)) for tokens, chars, *ended in choices)


def event_id(choices: Sequence[Choice]) -> bytes:
    """The id of an event after which the client has everything that has been taken from ``choices``: tokens and
    characters of each, and a dot if it has ended."""
    ended = (choice.end_seen or choice.finish_reason is not None for choice in choices)
    seen = zip(choices, ended, strict=True)
    return ",".join(f"{choice.num_tokens}.{choice.num_chars}{'.' * over}" for choice, over in seen).encode()


def with_id(events: bytes, choices: Sequence[Choice]) -> bytes:
    """Give the last of some events an id."""
    return events[:-1] + b"id: " + event_id(choices) + b"\n\n" if events else events


def _bad_header(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name}: {problem}.", param=name, code="invalid_header")
