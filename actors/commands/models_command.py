"""The command ``pagebus models``: which families are served."""

from __future__ import annotations

import argparse
import json
import sys

from pagebus.actors.settings.command_line import Commands

WIDTH = 160
"""Of the table where it goes to no terminal."""


def add_models(commands: Commands) -> None:
    """Add ``models`` to the command line."""
    parser = commands.add(
        "models",
        run_models,
        help="list the families of models that are served",
        description="For each family of models: its architectures in config.json, what differs from Llama, and which "
        "of its layers have experts or windows.",
    )
    parser.add_argument("--json", action="store_true", help="a JSON array on standard output")


def run_models(arguments: argparse.Namespace) -> int:
    """Print the table; returns 0."""
    from pagebus.actors.model.served import as_json, served

    if arguments.json:
        print(json.dumps(as_json()))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.HORIZONTALS, show_lines=False, pad_edge=False)
    for name in ("family", "architectures", "what differs from Llama", "experts", "windows"):
        table.add_column(name, overflow="fold")
    for row in served():
        cells = row.family, "\n".join(row.architectures), row.differs, row.experts, row.windows
        table.add_row(*map(Text, cells))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    return 0
