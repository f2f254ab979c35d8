"""What parsers hand out, and how they look for marks in a text that is not all there yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that leads to the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The ``index``-th call: of the tool ``name``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the ``index``-th call, as JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


def find_mark(text: str, mark: str) -> tuple[int, bool]:
    """Where ``mark`` begins in ``text``, and whether it is all there. If it is not, that is the place from which on the
    text could be the mark's beginning; the text's length if it cannot be."""
    found = text.find(mark)
    if found >= 0:
        return found, True
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length, False
    return len(text), False
