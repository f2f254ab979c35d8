"""Calls of tools in a text, by the formats that models were trained for.

==============  ====================================================================================================
``hermes``      ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once per call (Hermes, Qwen)
``llama3_json`` the text begins with ``{"name": ..., "parameters": {...}}``, maybe behind ``<|python_tag|>``; more calls
                after semicolons
``mistral``     ``[TOOL_CALLS]`` and a list of objects, or ``name{...}`` for each call
``required``    an array of objects ``{"name": ..., "parameters": {...}}`` (``tool_choice`` required; by a grammar)
``named``       nothing but arguments (``tool_choice`` with a name; by a grammar)
==============  ====================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from web.parsing.json_call import JsonCall
from web.parsing.text import CallArguments, CallBegun, Content, Part, find_mark


@dataclass(frozen=True, slots=True)
class Format:
    """``opens`` and ``closes`` are the marks around calls. ``opens`` empty: the text is calls from its beginning, or,
    with ``perhaps``, if it begins like one (behind that mark, if it is there) of a tool that there is."""

    opens: str = ""
    closes: str = ""
    perhaps: str | None = None


FORMATS = {
    "hermes": Format(opens="<tool_call>", closes="</tool_call>"),
    "mistral": Format(opens="[TOOL_CALLS]"),
    "llama3_json": Format(perhaps="<|python_tag|>"),
    "required": Format(),
    "named": Format(),
}
BETWEEN = " \n\r\t,;[]"
"""What may stand between calls."""
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)")
"""Mistral's newer way of naming a call, in front of its arguments."""


class ToolCallParser:
    """Finds the calls of one text. ``names``: the tools there are. ``named``: the one whose arguments the text is.
    ``most``: calls beyond so many are left out."""

    def __init__(self, name: str, names: Collection[str], *, named: str = "", most: int | None = None) -> None:
        self._format = FORMATS[name]
        self._names = names
        self._most = most
        self._named = named
        self._in_calls: bool | None = False if self._format.opens else None
        self._held = ""
        self._call: JsonCall | None = None
        self._begun = False
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        while self._held:
            before = len(self._held), self._in_calls
            if self._call is not None:
                yield from self._go_on(self._call)
            elif self._in_calls:
                yield from self._next_call()
            elif self._in_calls is None:
                self._begin()
            else:
                yield from self._content()
            if (len(self._held), self._in_calls) == before and self._call is None:
                return

    def finish(self) -> Iterator[Part]:
        """What was held back; calls that are cut off stay as they are."""
        if self._call is not None and not self._begun:
            self._held = self._call.raw + self._held
        if (self._call is None or not self._begun) and self._held and not (self.num_calls and self._held.isspace()):
            yield Content(self._held)
        self._held = ""

    def _begin(self) -> None:
        """Whether a text without marks is calls."""
        mark, beginning = self._format.perhaps, self._held.lstrip()
        if mark is None:
            self._in_calls = True
        elif beginning.startswith(mark):
            self._held, self._in_calls = beginning.removeprefix(mark), True
        elif beginning and not mark.startswith(beginning):
            self._in_calls = beginning.startswith("{")

    def _content(self) -> Iterator[Part]:
        """Content up to the next mark, without blanks that may turn out to stand between it and a call."""
        end, found = (len(self._held), False) if not self._format.opens else find_mark(self._held, self._format.opens)
        text = self._held[:end].rstrip() if self._format.opens else self._held
        if found:
            self._held, self._in_calls = self._held[end + len(self._format.opens) :], True
        else:
            self._held = self._held[len(text) :]
        if text:
            yield Content(text)

    def _next_call(self) -> Iterator[Part]:
        """To the beginning of the next call, or out of the marks."""
        closes, text = self._format.closes, self._held.lstrip(BETWEEN)
        if not text:
            self._held = ""
        elif closes and text.startswith(closes):
            self._held, self._in_calls = text.removeprefix(closes), False
        elif text[0] == "{":
            self._held, self._call, self._begun = text, JsonCall(self._named or None), False
        elif named := _NAMED.match(text):
            self._held, self._call, self._begun = text[named.end() :], JsonCall(named[1]), False
        elif (closes and closes.startswith(text)) or ("{" not in text and re.fullmatch(r"[\w.\-\[\] ]+", text)):
            self._held = text  # there may be more of it
        else:
            self._held, self._in_calls = text[1:], False
            yield Content(text[0])

    def _go_on(self, call: JsonCall) -> Iterator[Part]:
        """More of a call, and its end."""
        self._held = self._held[call.feed(self._held) :]
        if not self._begun and not call.broken and call.name is not None:
            if self._format.perhaps is None or call.name in self._names:
                self._begun = True
                self.num_calls += 1
                if self._shown:
                    yield CallBegun(self.num_calls - 1, call.name)
            else:
                call.broken = True
        if self._begun and self._shown and (new := call.take_arguments()):
            yield CallArguments(self.num_calls - 1, new)
        if call.broken or (call.done and not self._begun):
            self._call = None
            self._in_calls = False if self._format.perhaps is not None or self._format.opens else None
            if not self._begun:
                yield Content(call.raw)
        elif call.done:
            self._call = None

    @property
    def _shown(self) -> bool:
        return self._most is None or self.num_calls <= self._most
