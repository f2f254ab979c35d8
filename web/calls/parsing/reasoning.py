"""Separates reasoning, enclosed in marks, from the content that follows."""

from __future__ import annotations

from collections.abc import Iterator

from pagebus.actors.model.reasoning import ReasoningFormat
from pagebus.web.calls.parsing.text import Content, Part, Reasoning, begins_with, find_mark, may_begin_with


class ReasoningParser:
    """Splits one text. ``calls``: whether a call of a tool may end the reasoning without its mark."""

    def __init__(self, form: ReasoningFormat, *, calls: bool = False) -> None:
        self._form = form
        self._ends = form.closes + (form.implied_by if calls else ())
        self._inside: bool | None = None  # not known before the beginning is
        self._held = ""
        self._blanks = False
        """Blanks behind reasoning are neither that nor content."""

    def feed(self, text: str) -> Iterator[Part]:
        """The parts that are certain now."""
        self._held += text
        if self._inside is None and not self._begin():
            return
        if self._inside:
            end, mark = find_mark(self._held, self._ends)
            reasoning, self._held = self._held[:end], self._held[end:]
            if reasoning:
                yield Reasoning(reasoning)
            if not mark:
                return
            self._inside, self._blanks = False, True
            if mark in self._form.closes:
                self._held = self._held.removeprefix(mark)
        content, self._held = self._held, ""
        if self._blanks:
            content = content.lstrip()
        if content:
            self._blanks = False
            yield Content(content)

    def _begin(self) -> bool:
        """Find out what the text begins with; False if that takes more of it."""
        beginning = self._held.lstrip()
        if mark := begins_with(beginning, self._form.opens):
            self._inside, self._held = True, beginning.removeprefix(mark)
            return True
        if may_begin_with(beginning, self._form.opens):
            return False
        self._inside = self._form.inside
        return True

    def finish(self) -> Iterator[Part]:
        """What was held back."""
        if self._held:
            inside = self._form.inside if self._inside is None else self._inside
            yield Reasoning(self._held) if inside else Content(self._held)
            self._held = ""
