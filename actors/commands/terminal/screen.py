"""Output to a terminal, or unchanged to a pipe."""

from __future__ import annotations

import sys
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""What a terminal would obey: a model's text moves no cursor and sets no title."""


class Screen:
    """Writes pieces of a model's text. ``out`` is standard output unless given."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self.is_terminal = self._out.isatty()

    def text(self, text: str, *, dim: bool = False) -> None:
        """Some text of the model. Dim text is left out of pipes."""
        if not text or (dim and not self.is_terminal):
            return
        if self.is_terminal:
            text = text.translate(CONTROLS)
        self._out.write(f"{DIM}{text}{PLAIN}" if dim else text)
        self._out.flush()

    def note(self, text: str) -> None:
        """A line about the answer, for people only."""
        self.text(text + "\n", dim=True)
