"""The sentence on standard error with which a command that fails ends: what failed, and what to do.

Actors say it too. A supervisor does not pass on what its children say, but says one of their sentences at its own end.
"""

from __future__ import annotations

import contextlib
import sys

MARK = "pagebus: "
"""How the line begins; no line of the log does."""


def sentence(cause: str) -> str:
    """The line for a cause."""
    return MARK + " ".join(cause.split())


def say(cause: object) -> None:
    """Write the sentence; nothing is written behind it. Where it cannot be, as on a full disk, the exit code has to
    do."""
    with contextlib.suppress(OSError):
        print(sentence(str(cause)), file=sys.stderr, flush=True)


def heard(line: str) -> str | None:
    """The cause that a child's line of output says; None: it is another line."""
    return line.removeprefix(MARK) if line.startswith(MARK) else None
