"""Reasoning between think tags, apart from the content behind it."""

from __future__ import annotations

from collections.abc import Iterator

from web.parsing.text import Content, Part, Reasoning, find_mark

OPEN, CLOSE = "<think>", "</think>"
STARTS_INSIDE = {"deepseek_r1": True, "qwen3": False}
"""Parsers by name: whether a text is reasoning from its beginning (the chat template has written the tag), or only if
it begins with the tag."""


class ReasoningParser:
    """Splits one text."""

    def __init__(self, name: str) -> None:
        self._inside: bool | None = None  # not known before the beginning is
        self._starts_inside = STARTS_INSIDE[name]
        self._held = ""
        self._blanks = False
        """Blanks behind reasoning are neither that nor content."""

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        if self._inside is None and not self._begin():
            return
        if self._inside:
            end, closed = find_mark(self._held, CLOSE)
            reasoning, self._held = self._held[:end], self._held[end:]
            if reasoning:
                yield Reasoning(reasoning)
            if not closed:
                return
            self._inside, self._held, self._blanks = False, self._held.removeprefix(CLOSE), True
        content, self._held = self._held, ""
        if self._blanks:
            content = content.lstrip()
        if content:
            self._blanks = False
            yield Content(content)

    def _begin(self) -> bool:
        """Find out what the text begins with; False if that takes more of it."""
        beginning = self._held.lstrip()
        if beginning.startswith(OPEN):
            self._inside, self._held = True, beginning.removeprefix(OPEN)
            return True
        if OPEN.startswith(beginning):
            return False
        self._inside = self._starts_inside
        return True

    def finish(self) -> Iterator[Part]:
        """What was held back."""
        if self._held:
            inside = self._starts_inside if self._inside is None else self._inside
            yield Reasoning(self._held) if inside else Content(self._held)
            self._held = ""
