"""Parser of gpt-oss's Harmony format: messages with headers, ``<|channel|>analysis<|message|>text<|end|>``.

Text on the channel ``analysis`` is reasoning. A message to ``functions.name`` is a tool call, and its text the
arguments. Messages to other recipients (built-in tools) are dropped; everything else is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pagebus.web.calls.parsing.text import CallArguments, CallBegun, Content, Part, Reasoning, find_mark, may_begin_with

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, "<|channel|>")
HEADERS = (START, "<|channel|>", "to=", MESSAGE)
"""Possible beginnings of the first message's header: the template has written ``<|start|>assistant``."""
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser:
    """Splits one text. ``calls``: whether there are tools that may be called; ``most``: calls beyond that number are
    left out."""

    def __init__(self, *, calls: bool, most: int | None = None) -> None:
        self._calls = calls
        self._most = most
        self._held = ""
        self._in_header = True
        self._first = True
        self._kind = "content"
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        while self._held:
            if self._in_header:
                if self._first and not self._is_header():
                    return
                if self._in_header:
                    place, mark = find_mark(self._held, (MESSAGE,))
                    if not mark:
                        return
                    yield from self._begin(self._held[:place])
                    self._held = self._held[place + len(mark) :]
                continue
            place, mark = find_mark(self._held, ENDS)
            yield from self._part(self._held[:place])
            self._held = self._held[place:]
            if not mark:
                return
            self._held = self._held if mark in HEADERS else self._held.removeprefix(mark)
            self._in_header = True

    def finish(self) -> Iterator[Part]:
        """What was held back, unless it is a header."""
        if not self._in_header:
            yield from self._part(self._held)
        elif self._first and self._held.strip() and not self._held.lstrip().startswith(HEADERS):
            yield Content(self._held)
        self._held = ""

    def _is_header(self) -> bool:
        """Whether the text begins with one; False if that takes more of it. A text without any is content."""
        beginning = self._held.lstrip()
        if beginning.startswith(HEADERS):
            self._first = False
            return True
        if may_begin_with(beginning, HEADERS):
            return False
        self._first = self._in_header = False
        return True

    def _begin(self, header: str) -> Iterator[Part]:
        """A message, by its header."""
        self._in_header = False
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if recipient is not None:
            self._kind = ""
            if recipient[1].startswith("functions.") and self._calls:
                self.num_calls += 1
                if self._most is None or self.num_calls <= self._most:
                    self._kind = "call"
                    yield CallBegun(self.num_calls - 1, recipient[1].removeprefix("functions."))
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"

    def _part(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self._kind == "reasoning":
            yield Reasoning(text)
        elif self._kind == "content":
            yield Content(text)
        elif self._kind == "call":
            yield CallArguments(self.num_calls - 1, text)
