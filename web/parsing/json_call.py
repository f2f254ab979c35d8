"""One call of a tool, ``{"name": ..., "arguments": {...}}``, read as it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class JsonCall:
    """Fed from its opening brace on.

    ``name`` is None until it is known. ``raw`` is everything read. ``done``: the closing brace has been read.
    ``broken``: it is no JSON object. With a ``name`` given from the beginning, the object itself is the arguments.
    """

    name: str | None = None
    raw: str = ""
    done: bool = False
    broken: bool = False
    _depth: int = 0
    _in_string: bool = False
    _escaped: bool = False
    _key: str | None = None
    _piece: str = ""
    _new: list[str] = field(default_factory=list)
    _has_arguments: bool = False
    _bare: bool = False

    def __post_init__(self) -> None:
        self._bare = self.name is not None

    def feed(self, text: str) -> str:
        """Read on; returns what is behind the call."""
        for place, char in enumerate(text):
            if self.done or self.broken:
                return text[place:]
            self.raw += char
            self._read(char)
        return ""

    def take_arguments(self) -> str:
        """What is new of the arguments."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _read(self, char: str) -> None:
        at_top = self._depth == 1 and not self._in_string
        opens = self._depth == 0
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
            self._piece += char
            if self._key in ARGUMENTS and (self._depth > 1 or (char == "}" and not self._in_string and not at_top)):
                self._new.append(char)
                self._has_arguments = True

    def _track(self, char: str) -> None:
        """How deep in braces and strings the next character is."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1

    def _end_key(self) -> None:
        self._key, self._piece = _string(self._piece), ""
        self.broken = self._key is None

    def _end_value(self) -> None:
        """A value is complete: the name, or arguments that are no object but text of one."""
        if self._key == "name":
            self.name = _string(self._piece)
            self.broken = self.name is None
        elif self._key in ARGUMENTS and not self._has_arguments:
            text = _string(self._piece)
            self._new.append(self._piece.strip() if text is None else text)
            self._has_arguments = True
        self._key, self._piece = None, ""
        if self._depth == 0 and not self._has_arguments:
            self._new.append("{}")


def _string(text: str) -> str | None:
    """What a JSON string says; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
