"""Messages that no actor could process: shown with the reason; sent again, or dropped."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import structs

from pagebus.actors.settings import KINDS, SettingsError
from pagebus.bus.contract import Bus, BusError
from pagebus.bus.dead_letters import DeadLetter, drop, read_dead_letters, requeue
from pagebus.bus.messages.record import Record
from pagebus.bus.streams import Names

WIDTH = 10_000
"""Columns of the table of letters: no reason is cut, and each letter has one line, which a terminal may break."""
SHOWN_ARRAY = 16
"""So many numbers of an array are shown, and how many there are."""


async def act(arguments: argparse.Namespace, bus: Bus, names: Names) -> int:
    """Do what is asked; returns the exit code (1: a letter is not there, or cannot be sent again)."""
    try:
        await bus.connect()
        kept = [letter for stage in KINDS for letter in await read_dead_letters(bus, names, stage)]
        if arguments.action == "list":
            _print(kept, json_wanted=arguments.json, whole=False)
            return 0
        wanted, missing = _chosen(kept, arguments.letters, everything=arguments.all)
        for name in missing:
            print(f"pagebus: {name}: there is no such dead letter", file=sys.stderr)
        if arguments.action == "show":
            _print(wanted, json_wanted=arguments.json, whole=True)
            return 1 if missing else 0
        done = [letter for letter in wanted if await _apply(arguments.action, bus, names, letter)]
        _print(done, json_wanted=arguments.json, whole=False)
        return 0 if len(done) == len(wanted) and not missing else 1
    finally:
        await bus.close()


async def _apply(action: str, bus: Bus, names: Names, letter: DeadLetter) -> bool:
    """Send one again or remove it; False, and the reason on standard error, if that cannot be."""
    if action == "drop":
        return await drop(bus, names, letter.stage, [letter.id]) == 1
    try:
        await requeue(bus, names, letter)
    except BusError as error:
        print(f"pagebus: {error}", file=sys.stderr)
        return False
    return True


def _chosen(
    kept: Iterable[DeadLetter], given: Sequence[str], *, everything: bool
) -> tuple[list[DeadLetter], Sequence[str]]:
    """The letters that are meant, and what was named but is not there."""
    if not given and not everything:
        raise SettingsError("name dead letters as `pagebus dead-letters list` shows them, or say --all")
    by_name = {_name(letter): letter for letter in kept}
    wanted = {n: each for n, each in by_name.items() if everything or n in given or each.stage in given}
    missing = [name for name in given if name not in wanted and name not in KINDS]
    return list(wanted.values()), missing


def _name(letter: DeadLetter) -> str:
    return f"{letter.stage}/{letter.id}"


# -- printing ---------------------------------------------------------------------------------------------------------


def _print(letters: Sequence[DeadLetter], *, json_wanted: bool, whole: bool) -> None:
    rows = [_row(letter, whole=whole) for letter in letters]
    if json_wanted:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("none")
    elif whole:
        print("\n\n".join("\n".join(f"{key}: {_text(value)}" for key, value in row.items()) for row in rows))
    else:
        _print_table(rows)


def _row(letter: DeadLetter, *, whole: bool) -> dict[str, Any]:
    """The fields of a dead letter to print; ``whole``: with those of its message."""
    row = {
        "letter": _name(letter),
        "died": datetime.fromtimestamp(letter.died_s, UTC).isoformat(timespec="seconds"),
        "message": type(letter.message).__name__ if letter.message is not None else None,
        "request": letter.request_id,
        "deliveries": letter.deliveries,
        "reason": letter.reason,
    }
    if not whole:
        return row
    shown = _shown(letter.message) if letter.message is not None else {}
    return row | {"from": f"{letter.source} {letter.source_id}", "bytes": letter.num_bytes, "fields": shown}


def _shown(value: Any) -> Any:
    """A field as JSON; arrays are cut."""
    if hasattr(value, "tolist"):
        return value.tolist() if value.size <= SHOWN_ARRAY else [*value[:SHOWN_ARRAY].tolist(), f"... {value.size}"]
    if isinstance(value, Record):
        return {name: _shown(each) for name, each in structs.asdict(value).items()}
    if isinstance(value, tuple | list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _shown(each) for key, each in value.items()}
    return value


def _text(value: Any) -> str:
    """On one line, whatever the message holds: nothing in it reaches the terminal as a control character."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(_text(value)) for value in row.values()))
    Console(soft_wrap=True, width=WIDTH).print(table)
