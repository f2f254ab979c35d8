"""Incremental parser of one tool call whose arguments are tags around bare values; emits them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from pagebus.web.calls.parsing.formats import Tags
from pagebus.web.calls.parsing.text import find_mark
from pagebus.web.calls.parsing.values import STRING, Types, typed

NAME = re.compile(r"[\w.:/-]{1,128}")
Step = Callable[[], bool]
"""Reads what is certain; whether there may be more to read."""


class TaggedCall:
    """Fed from its first mark on, which has to be all there. ``name`` is None until it is known, ``raw`` is what was
    read until then. ``done``: it has ended. ``broken``: it is no call. ``types``: of each argument of each tool; values
    that may only be strings are handed out as they come, others when they are whole."""

    def __init__(self, tags: Tags, types: Mapping[str, Mapping[str, Types]]) -> None:
        self.name: str | None = None
        self.raw = ""
        self.done = False
        self.broken = False
        self._tags = tags
        self._all_types = types
        self._types: Types = STRING
        self._held = ""
        self._new: list[str] = []
        self._num_keys = 0
        self._begun = False
        """Whether something of the value has been read: what comes first may be a line break that is none of it."""
        self._step: Step = self._read_name

    def feed(self, text: str) -> str:
        """Read on; returns what is behind the call, which may have come before ``text``."""
        self.raw += text if self.name is None else ""
        self._held += text
        while not (self.done or self.broken) and self._step():
            pass
        rest, self._held = (self._held, "") if self.done else ("", self._held)
        return rest

    def take_arguments(self) -> str:
        """What is new of the arguments, as JSON."""
        text = "".join(self._new)
        self._new.clear()
        return text

    def _read_name(self) -> bool:
        tags = self._tags
        ends = (tags.name_ends,) if tags.name_ends else (tags.key, *tags.leaves)
        rest = self._held.removeprefix(tags.name)
        place, mark = find_mark(rest, ends)
        name = rest[:place].strip()
        self.broken = NAME.fullmatch(name) is None if mark or name else False
        if self.broken or not mark:
            return False
        self.name, self._held, self._step = name, rest[place:].removeprefix(tags.name_ends), self._read_between
        return True

    def _read_between(self) -> bool:
        """To the next key, or the end."""
        tags = self._tags
        ends = tuple(filter(None, (tags.closes, *tags.leaves)))
        place, mark = find_mark(self._held, (tags.key, *ends))
        self._held = self._held[place:]
        if mark == tags.key:
            self._held, self._step = self._held[len(mark) :], self._read_key
        elif mark:
            self._held = self._held.removeprefix(tags.closes) if tags.closes else self._held
            self._new.append("}" if self._num_keys else "{}")
            self.done = True
        return bool(mark)

    def _read_key(self) -> bool:
        place, mark = find_mark(self._held, (self._tags.key_ends,))
        if not mark:
            return False
        key, self._held = self._held[:place].strip(), self._held[place + len(mark) :]
        self._types = self._all_types.get(self.name or "", {}).get(key, STRING)
        self._new.append(f"{', ' if self._num_keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_keys += 1
        self._begun, self._step = False, self._find_value
        return True

    def _find_value(self) -> bool:
        """To where the value begins; a key without any has an empty one."""
        if self._tags.value:
            place, mark = find_mark(self._held, (self._tags.value, self._tags.key, *self._tags.leaves))
            if not mark:
                return False
            self._held = self._held[place:].removeprefix(self._tags.value)
        if self._types == STRING:
            self._new.append('"')
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        tags = self._tags
        leaves = tuple(filter(None, (tags.closes, *tags.leaves, tags.key if tags.value else "")))
        place, mark = find_mark(self._held, (tags.value_ends, *leaves))
        whole = bool(mark)
        if self._types == STRING:
            self._take_text(place, whole)
        elif whole:
            value = self._trimmed(self._held[:place])
            self._held = self._held[place:]
            self._new.append(typed(value, self._types))
        if whole:
            self._held, self._step = self._held.removeprefix(tags.value_ends), self._read_between
        return whole

    def _take_text(self, place: int, whole: bool) -> None:
        """Hand out the part of a string that is certain, up to ``place``."""
        text = self._held[:place]
        if self._tags.trims:
            if text and not self._begun:
                self._begun, text = True, text.removeprefix("\n")
            if text.endswith("\n") and not whole:
                place, text = place - 1, text[:-1]  # it may be the last one
            elif whole:
                text = text.removesuffix("\n")
        self._held = self._held[place:]
        escaped = json.dumps(text, ensure_ascii=False)[1:-1]
        self._new.append(escaped + '"' if whole else escaped)

    def _trimmed(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._tags.trims else text
