"""Progress of `pagebus serve` at startup: one changing line on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

BAR_WIDTH = 24
CLEAR_LINE = "\r\x1b[2K"
READY = "ready"
LOG_STEP = 0.25
"""Without a terminal a line is written each quarter of a phase."""


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """``[#####...]`` for a share of 0 to 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "[" + "#" * full + "." * (width - full) + "]"


def summary(executors: Iterable[Mapping[str, Any]], wanted: int) -> tuple[str, float | None]:
    """Phase and share (0 to 1) of the slowest of the ``wanted`` executors, from what their leases say.

    The share is None before they have begun, and the phase ``READY`` once all have finished.
    """
    infos = list(executors)
    loading = [info for info in infos if info.get("state") not in ("ready", "draining")]
    if len(infos) < wanted:
        return "starting actors", None
    if not loading:
        return READY, 1.0
    slowest = min(loading, key=lambda info: float(info.get("progress") or 0.0))
    return str(slowest.get("phase") or "loading"), float(slowest.get("progress") or 0.0)


def graphs_of(info: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many CUDA graphs an executor has captured, of how many, by its lease; None where there are none."""
    planned = info.get("num_planned_graphs")
    return (int(info["num_graphs"]), int(planned)) if planned else None


class Progress:
    """Draws the startup on ``out``; other lines for the same terminal must go through :meth:`line`.

    Without a terminal each new phase, and each quarter of one, is reported once, through ``tell`` (default: as a line).
    """

    def __init__(self, out: TextIO, *, terminal: bool, tell: Callable[[str, float | None], None] | None = None) -> None:
        self._out = out
        self._terminal = terminal
        self._tell = tell or (lambda phase, share: self.line(phase if share is None else f"{phase}: {share:.0%}"))
        self._drawn = ""
        self._told: tuple[str, int] | None = None

    def show(self, phase: str, share: float | None = None, detail: str = "") -> None:
        """Show that ``phase`` has come to ``share`` (0 to 1; None: there is no saying how far). Another ``detail`` is
        no other phase."""
        told = f"{phase} {detail}".rstrip()
        if self._terminal:
            width = shutil.get_terminal_size().columns
            text = (f"... {told}" if share is None else f"{bar(share)} {share:4.0%}  {told}")[: width - 1]
            if text != self._drawn:
                self._drawn = text
                self._write(CLEAR_LINE + text)
            return
        step = (phase, int((share or 0.0) / LOG_STEP))
        if step != self._told:
            self._told = step
            self._tell(told, share)

    def line(self, text: str) -> None:
        """Write a whole line, above the bar."""
        self._write((CLEAR_LINE if self._drawn else "") + text + "\n" + self._drawn)

    def done(self) -> None:
        """Take the bar away; what comes next is another matter."""
        self._told = None
        if self._drawn:
            self._drawn = ""
            self._write(CLEAR_LINE)

    def _write(self, text: str) -> None:
        """What cannot be written is lost, as on a full disk: those that write here go on, and later lines are there
        again."""
        with contextlib.suppress(OSError):
            self._out.write(text)
            self._out.flush()


class ProgressStream(io.TextIOBase):
    """A text stream for log handlers that writes through a :class:`Progress`, line by line."""

    def __init__(self, progress: Progress, terminal: bool) -> None:
        self._progress = progress
        self._terminal = terminal
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._progress.line(line)
        return len(text)

    def isatty(self) -> bool:
        return self._terminal
