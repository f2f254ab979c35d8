"""Finds tool calls in a text, in the formats that models were trained for
(:mod:`pagebus.web.calls.parsing.formats`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from pagebus.web.calls.parsing.formats import Format
from pagebus.web.calls.parsing.json_call import JsonCall
from pagebus.web.calls.parsing.python_call import PythonCall
from pagebus.web.calls.parsing.tagged_call import TaggedCall
from pagebus.web.calls.parsing.text import (
    CallArguments,
    CallBegun,
    Content,
    Part,
    begins_with,
    find_mark,
    may_begin_with,
)
from pagebus.web.calls.parsing.values import Types

BETWEEN = " \n\r\t,;[]"
"""Characters that may stand between calls, beside marks."""
MAX_HEADER_CHARS = 512


class Call(Protocol):
    """Reads one call. ``name``: None until it is known. ``broken``: it is no call."""

    name: str | None
    done: bool
    broken: bool

    @property
    def raw(self) -> str:
        """What it read until its name was known."""
        ...

    def feed(self, text: str) -> str:
        """Read on; returns what is behind the call."""
        ...

    def take_arguments(self) -> str:
        """What is new of the arguments, as JSON."""
        ...


class ToolCallParser:
    """Finds the calls of one text. ``names``: the tools there are. ``named``: the one whose arguments the text is.
    ``most``: calls beyond that number are left out. ``types``: of the tools' arguments, for formats that do not say."""

    def __init__(
        self,
        form: Format,
        names: Collection[str],
        *,
        named: str = "",
        most: int | None = None,
        types: Mapping[str, Mapping[str, Types]] | None = None,
    ) -> None:
        self._format = form
        self._names = names
        self._most = most
        self._named = named
        self._types = types or {}
        self._in_calls: bool | None = False if form.marked else None  # None: not known before the beginning is
        self._held = ""
        self._lead = ""
        """What was read since the marks began, until the first call begins: it is content if none does."""
        self._called = False
        """Whether a call has begun since then."""
        self._call: Call | None = None
        self._call_id = ""
        self._begun = False
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        while self._held:
            before = len(self._held), self._in_calls, self._call
            if self._call is not None:
                yield from self._go_on(self._call)
            elif self._in_calls:
                yield from self._next_call()
            elif self._in_calls is None:
                self._begin()
            else:
                yield from self._content()
            if (len(self._held), self._in_calls, self._call) == before:
                return

    def finish(self) -> Iterator[Part]:
        """What was held back; calls that are cut off stay as they are."""
        if self._call is None or not self._begun:
            held = self._lead + (self._call.raw if self._call is not None else "") + self._held
            if held and not (self.num_calls and held.isspace()):
                yield Content(held)
        self._held = self._lead = ""

    def _begin(self) -> None:
        """Whether a text without marks is calls."""
        lead, perhaps, beginning = self._format.lead, self._format.perhaps, self._held.lstrip()
        if not perhaps:
            self._in_calls = True
        elif lead and beginning.startswith(lead):
            self._take_lead(len(self._held) - len(beginning) + len(lead))
            self._in_calls = True
        elif beginning and not (lead and lead.startswith(beginning)):
            self._in_calls = beginning.startswith(perhaps)

    def _content(self) -> Iterator[Part]:
        """Content up to the next mark, without blanks that may turn out to stand between it and a call."""
        form = self._format
        end, mark = find_mark(self._held, (*form.opens, *form.starts))
        text = self._held[:end].rstrip() if form.marked else self._held
        if mark:
            self._held, self._in_calls, self._called = self._held[end:], True, False
            if mark in form.opens:
                self._take_lead(len(mark))
        else:
            self._held = self._held[len(text) :]
        if text:
            yield Content(text)

    def _take_lead(self, length: int) -> None:
        self._lead += "" if self._called else self._held[:length]
        self._held = self._held[length:]

    def _next_call(self) -> Iterator[Part]:
        """To the beginning of the next call, or out of the marks."""
        form = self._format
        marks = (*form.between, *((form.closes,) if form.closes else ()))
        self._skip(marks)
        if not self._held:
            return
        if form.closes and self._held.startswith(form.closes):
            self._held, self._in_calls, self._lead = self._held.removeprefix(form.closes), False, ""
        elif may_begin_with(self._held, marks):
            return
        elif (begins := self._begin_call()) is False:
            self._in_calls = False
            yield from self._give_back(self._held)
        elif begins:
            self._begun = False

    def _skip(self, marks: tuple[str, ...]) -> None:
        """Drop what says nothing. A bracket may be the beginning of a mark."""
        while self._held:
            length = len(begins_with(self._held, self._format.between))
            if not length and self._held[0] in BETWEEN and not may_begin_with(self._held, marks):
                length = 1
            if not length:
                return
            self._take_lead(length)

    def _begin_call(self) -> bool | None:
        """Begin to read a call; False if there is none, None if that is not certain yet."""
        form = self._format
        if form.call == "python":
            self._call = PythonCall(self._names)
        elif form.call == "tagged" and form.tags is not None:
            if not self._held.startswith(form.tags.name):
                return None if form.tags.name.startswith(self._held) else False
            self._call = TaggedCall(form.tags, self._types)
        elif self._held.startswith("{"):
            self._call, self._call_id = JsonCall(self._named or None), ""
        elif form.header is not None:
            return self._read_header()
        else:
            return False
        return True

    def _read_header(self) -> bool | None:
        assert self._format.header is not None
        header, brace, _ = self._held.partition("{")
        if len(header) > MAX_HEADER_CHARS:
            return False
        if not brace:
            return None
        if (match := self._format.header.fullmatch(header)) is None:
            return False
        self._take_lead(len(header))
        self._call, self._call_id = JsonCall(match["name"]), match.groupdict().get("id") or ""
        return True

    def _go_on(self, call: Call) -> Iterator[Part]:
        """More of a call, and its end."""
        self._held = call.feed(self._held)
        if not self._begun and not call.broken and call.name is not None:
            if self._format.perhaps and call.name not in self._names:
                call.broken = True
            else:
                self._begun, self._called, self._lead = True, True, ""
                self.num_calls += 1
                if self._shown:
                    yield CallBegun(self.num_calls - 1, call.name, self._call_id)
        if self._begun and self._shown and (new := call.take_arguments()):
            yield CallArguments(self.num_calls - 1, new)
        if call.broken or (call.done and not self._begun):
            self._call, self._in_calls = None, False
            if not self._begun:
                yield from self._give_back(call.raw + self._held)
        elif call.done:
            self._call = None

    def _give_back(self, text: str) -> Iterator[Part]:
        """What looked like a call and is none is content; in what follows on its first character there may be one."""
        yield Content(self._lead + text[:1])
        self._lead, self._held = "", text[1:]

    @property
    def _shown(self) -> bool:
        return self._most is None or self.num_calls <= self._most
