"""A file that says to a container's health check that an actor is well, while it is young.

A look at it costs a thousandth of what a program costs that asks the bus.
"""

from __future__ import annotations

import contextlib
from pathlib import Path


class HealthFile:
    """Touched each time a healthy actor renews its lease, removed once it is not healthy; ``path`` None: no file."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)

    def tell(self, well: bool) -> None:
        """The actor is well now, or it is not. A file that cannot be written gets old, as it should."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            if well:
                self._path.touch()
            else:
                self._path.unlink(missing_ok=True)
