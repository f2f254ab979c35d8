"""Incremental parser of one tool call in JSON, ``{"name": ..., "arguments": {...}}``."""

from __future__ import annotations

import json
import re

ARGUMENTS = ("arguments", "parameters")
IN_STRING, OUTSIDE = re.compile(r'["\\]'), re.compile(r'["{}\[\]:,]')
"""Characters that end a run without structural meaning."""


class JsonCall:
    """Fed from its opening brace on.

    ``name`` is None until it is known. ``raw`` is what was read until then. ``done``: the closing brace has been read.
    ``broken``: it is no JSON object. With a ``name`` given from the beginning, the object itself is the arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.raw = ""
        self.done = False
        self.broken = False
        self._bare = name is not None
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._pieces: list[str] = []
        self._new: list[str] = []
        self._has_arguments = False

    def feed(self, text: str) -> str:
        """Read on; returns what is behind the call."""
        was_named, place = self.name is not None, 0
        while place < len(text) and not (self.done or self.broken):
            end = self._run_end(text, place)
            if end > place:
                self._take(text[place:end], inside=self._depth > 1)
            else:
                end = place + 1
                self._read(text[place])
            place = end
        if not was_named:
            self.raw += text[:place]
        return text[place:]

    def take_arguments(self) -> str:
        """What is new of the arguments."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _run_end(self, text: str, place: int) -> int:
        """Where a run of characters ends that only belong to a value."""
        if self._depth == 0:
            return place
        if self._escaped:
            self._escaped = False
            return place + 1
        found = (IN_STRING if self._in_string else OUTSIDE).search(text, place)
        return len(text) if found is None else found.start()

    def _read(self, char: str) -> None:
        """A character that may say something about the form."""
        at_top, opens = self._depth == 1 and not self._in_string, self._depth == 0
        was_deep = self._depth > 1
        self._track(char)
        if self._bare:
            self._new.append(char)
            self.done = self._depth == 0
        elif opens:
            self.broken = char != "{"
        elif self._depth == 0:
            self._end_value()
            self.done = True
        elif at_top and char == ":" and self._key is None:
            self._end_key()
        elif at_top and char == ",":
            self._end_value()
        else:
            self._take(char, inside=was_deep or self._depth > 1)

    def _take(self, text: str, *, inside: bool) -> None:
        """More of a key or a value; ``inside``: of an object or an array that is one."""
        if self._bare:
            self._new.append(text)
        elif inside and self._key in ARGUMENTS:
            self._new.append(text)
            self._has_arguments = True
        else:
            self._pieces.append(text)

    def _track(self, char: str) -> None:
        """How deep in braces and strings the next character is."""
        if self._in_string:
            self._in_string = char != '"'
            self._escaped = char == "\\"
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _end_key(self) -> None:
        self._key = _string(self._piece())
        self.broken = self._key is None

    def _end_value(self) -> None:
        """A value is complete: the name, or arguments that are no object but text of one."""
        piece = self._piece()
        if self._key == "name":
            self.name = _string(piece)
            self.broken = self.name is None
        elif self._key in ARGUMENTS and not self._has_arguments:
            text = _string(piece)
            self._new.append(piece.strip() if text is None else text)
            self._has_arguments = True
        self._key = None
        if self._depth == 0 and not self._has_arguments:
            self._new.append("{}")

    def _piece(self) -> str:
        piece = "".join(self._pieces)
        self._pieces.clear()
        return piece


def _string(text: str) -> str | None:
    """What a JSON string says; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
