"""Resumable answers: ``Idempotency-Key``, event ids and ``Last-Event-ID``.

The id of a request with a key follows from the key. The same request sent again, to any ingress, therefore joins the
one under way, or gets its result. The id of each event says how much of the answer the client has after it. A client
that lost its connection sends the last id and gets the rest. The ingress stores nothing for this.

An id has a part per choice, joined by commas: ``12.57`` is 12 tokens and 57 characters; ``12.57.`` includes the end of
the choice. Text that arrived at once may be sent as several events: ``8.31~12.57~2`` is everything up to ``8.31`` and
two of the events between there and ``12.57``. ``!1`` behind the choices is one of the events that end the stream.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagebus.web.http.errors import ApiError
from pagebus.web.http.fields import Schema

MAX_KEY_CHARS = 255
RESUMPTION_HEADERS: dict[str, Schema] = {
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
    "Last-Event-ID": {
        "type": "string",
        "description": "The id of the last event that came: the stream goes on after it.",
    },
}
_PLACE = r"[0-9]{1,9}\.[0-9]{1,9}\.?"
_CHOICE = rf"{_PLACE}(~{_PLACE}~[0-9]{{1,9}})?"
_ID = re.compile(rf"{_CHOICE}(,{_CHOICE})*(![0-9]{{1,9}})?")


class Place(NamedTuple):
    """So many tokens and characters of a choice, and whether its end."""

    num_tokens: int = 0
    num_chars: int = 0
    ended: bool = False

    def __str__(self) -> str:
        tokens, chars, ended = self
        return f"{tokens}.{chars}." if ended else f"{tokens}.{chars}"

    @classmethod
    def parse(cls, text: str) -> Place:
        tokens, chars, *ended = text.split(".")
        return cls(int(tokens), int(chars), bool(ended))


BEGINNING = Place()


@dataclass(frozen=True, slots=True)
class Had:
    """What a client has of a choice: all up to ``place``, and then the first ``num_events`` of those that tell it up to
    ``towards``; None: it has no such events."""

    place: Place = BEGINNING
    towards: Place | None = None
    num_events: int = 0

    def __str__(self) -> str:
        return f"{self.place}" if self.towards is None else f"{self.place}~{self.towards}~{self.num_events}"

    @classmethod
    def parse(cls, text: str) -> Had:
        place, *rest = text.split("~")
        if not rest:
            return cls(Place.parse(place))
        return cls(Place.parse(place), Place.parse(rest[0]), int(rest[1]))


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client has of its choices, and how many of the events at the end."""

    choices: tuple[Had, ...]
    num_last: int = 0

    def __str__(self) -> str:
        return ",".join(map(str, self.choices)) + (f"!{self.num_last}" if self.num_last else "")

    @classmethod
    def parse(cls, text: str) -> Seen:
        choices, _, num_last = text.partition("!")
        return cls(tuple(map(Had.parse, choices.split(","))), int(num_last or 0))


@dataclass(frozen=True, slots=True)
class Resumption:
    """``request_id``: the public id without its prefix. ``attempt``: unique. ``seen``: what the client has; None: it
    begins."""

    request_id: str
    attempt: str
    seen: Seen | None

    def seen_of(self, num_choices: int, *, streaming: bool) -> Seen:
        """What the client has of its ``num_choices`` choices.

        Raises:
            ApiError: 400, its last event is not one of such a request.
        """
        if self.seen is None:
            return Seen((Had(),) * num_choices)
        if not streaming:
            raise _bad_header("Last-Event-ID", "only a request with stream has events")
        if len(self.seen.choices) != num_choices:
            told = len(self.seen.choices)
            raise _bad_header("Last-Event-ID", f"it speaks of {told} choices, the request of {num_choices}")
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
    return Resumption(request_id_of_key(key, owner), uuid.uuid4().hex, None if last is None else _read_seen(last))


def request_id_of_key(key: str, owner: str) -> str:
    """The public id, without its prefix, of the requests of an owner with this ``Idempotency-Key``."""
    return hashlib.blake2b(f"{owner}\0{key}".encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _read_seen(last: str) -> Seen:
    if not _ID.fullmatch(last):
        raise _bad_header("Last-Event-ID", "it is not the id of an event of this server")
    return Seen.parse(last)


def with_ids(events: bytes, ids: Sequence[str]) -> bytes:
    """Give each of some events its id."""
    parts = split_events(events)
    return b"".join([b"%b\nid: %b\n\n" % (part, seen.encode()) for part, seen in zip(parts, ids, strict=True)])


def with_id(event: bytes, seen: str) -> bytes:
    """Give a single event its id."""
    return b"%bid: %b\n\n" % (event[:-1], seen.encode())


def split_events(events: bytes) -> list[bytes]:
    """The events one by one, without the empty line behind each."""
    return events.split(b"\n\n")[:-1]


def joined(events: Sequence[bytes]) -> bytes:
    """Events that were split."""
    return b"".join([event + b"\n\n" for event in events])


def _bad_header(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name}: {problem}.", param=name, code="invalid_header")
