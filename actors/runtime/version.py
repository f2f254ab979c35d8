"""The version of Pagebus that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    """The version of the installed distribution."""
    try:
        return installed("pagebus")
    except PackageNotFoundError:
        return "0+unknown"
