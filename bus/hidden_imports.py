"""Hides optional packages from libraries that would import them, and load much more, although Pagebus uses none of
it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_imports(*packages: str) -> Iterator[None]:
    """Imports inside this block do not find ``packages``; packages that are already imported stay."""
    hidden = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: it cannot be imported
    try:
        yield
    finally:
        for package in hidden:
            sys.modules.pop(package, None)
