"""Spans of an actor's work in wall-clock time, kept in memory and written when it stops (``--span-dir``)."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

from pagebus.actors.settings import Settings

MAX_SPANS = 400_000
"""The latest are kept: about a minute of the fastest steps."""
LAUNCH, EAGER, CAPTURE = "launch", "launch without graph", "capture"
"""What an executor notes of a step's launch, from a graph or kernel by kernel, and of graphs that it captures."""


class Spans:
    """The spans of one actor. Any thread may add; without ``--span-dir`` there is no such object at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._spans: deque[tuple[str, int, float, float]] = deque(maxlen=MAX_SPANS)

    def add(self, name: str, step: int, began_s: float, ended_s: float) -> None:
        """``name`` of ``step`` (0: of none) took from ``began_s`` to ``ended_s``, seconds of the wall clock."""
        self._spans.append((name, step, began_s, ended_s))

    def write(self) -> None:
        """Store all spans as JSON Lines: ``[name, step, began_s, ended_s]``."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(span) + "\n" for span in list(self._spans))


def spans_of(settings: Settings, actor: str) -> Spans | None:
    """Where ``actor`` notes its spans; None unless they are asked for."""
    return None if settings.span_dir is None else Spans(Path(settings.span_dir) / f"{actor}.jsonl")


def read_spans(path: Path) -> list[tuple[str, int, float, float]]:
    """The spans that an actor has written."""
    with path.open(encoding="utf-8") as file:
        return [
            (str(name), int(step), float(began), float(ended)) for name, step, began, ended in map(json.loads, file)
        ]
