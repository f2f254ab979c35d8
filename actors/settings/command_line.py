"""Adds a command to the command line of ``pagebus``: its arguments, their types, and the function that runs it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

Run = Callable[[argparse.Namespace], int]
"""Does what the arguments ask for; returns the exit code (0 done, 1 failed, 2 unusable settings or model)."""

SETTINGS_EPILOG = (
    "Every option can also come from the environment (--max-model-len: PAGEBUS_MAX_MODEL_LEN) or from the TOML file "
    "given with --config (max_model_len = 4096). The command line wins, then the environment, then the file."
)
"""Below the options of commands that take all settings."""


class Commands:
    """The commands below a parser: those of ``pagebus``, or those of one of its commands.

    Args:
        dest: the attribute of the arguments that is to hold the name of the command.
    """

    def __init__(self, parser: argparse.ArgumentParser, dest: str = "command") -> None:
        self._parsers = parser.add_subparsers(dest=dest, required=True, metavar=dest.upper())

    def add(
        self, name: str, run: Run | None = None, *, help: str, description: str, epilog: str | None = None
    ) -> argparse.ArgumentParser:
        """Add a command, whose arguments have ``run`` (None: that of the command above) and ``parser`` as attributes;
        returns the parser. Options have to be written out: what an abbreviation means would change with the next
        option."""
        parser = self._parsers.add_parser(name, help=help, description=description, epilog=epilog, allow_abbrev=False)
        parser.set_defaults(parser=parser)
        if run is not None:
            parser.set_defaults(run=run)
        return parser


def number(text: str) -> float:
    """The type of an option with a number: ``float`` takes ``nan`` and ``inf``, too, which few ranges refuse."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def amount(text: str) -> float:
    """The type of an option with a number above 0."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def count(text: str) -> int:
    """The type of an option with a whole number above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def rate(text: str) -> float:
    """The type of an option with a rate, which may be ``inf``."""
    return math.inf if text == "inf" else number(text)


def output_file(text: str) -> Path:
    """The type of an option that names a file to write, which is found unusable before anything is computed for it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    if not path.exists() and not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def output_folder(text: str) -> Path:
    """The type of an option that names a folder to write into, which is made."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    return path
