"""Output types of the parsers, and the search for marks in incomplete text."""

from __future__ import annotations

from collections.abc import Iterable
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
    """The ``index``-th call: of the tool ``name``. ``id``: what the model calls it by; empty: nothing."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the ``index``-th call, as JSON text."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


def find_mark(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """Where the first of ``marks`` begins in ``text``, and which it is. If none is all there, it is empty, and the
    place is the one from which on the text could be the beginning of one; the text's length if it cannot be."""
    marks = tuple(marks)
    found = min(((place, mark) for mark in marks if (place := text.find(mark)) >= 0), default=None)
    return found or (min((_partial(text, mark) for mark in marks), default=len(text)), "")


def _partial(text: str, mark: str) -> int:
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return len(text) - length
    return len(text)


def begins_with(text: str, marks: Iterable[str]) -> str:
    """Which of ``marks`` the text begins with; empty: none."""
    return next((mark for mark in marks if mark and text.startswith(mark)), "")


def may_begin_with(text: str, marks: Iterable[str]) -> bool:
    """Whether it could begin with one of them once there is more of it."""
    return any(mark.startswith(text) for mark in marks)
