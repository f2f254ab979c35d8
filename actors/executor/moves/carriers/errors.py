"""How a pull fails. The executor goes on: what could not be had is computed."""

from __future__ import annotations


class MoveError(Exception):
    """Blocks of another executor's cache cannot be had; the text says why."""


class Abandoned(MoveError):
    """Nobody waits for the blocks any more."""
