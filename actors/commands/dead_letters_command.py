"""The command ``pagebus dead-letters``. What it does is imported once it is known that it is wanted."""

from __future__ import annotations

import argparse
import asyncio

from pagebus.actors.settings.command_line import SETTINGS_EPILOG, Commands
from pagebus.actors.settings.sources import add_bus_arguments, load_settings
from pagebus.actors.telemetry.last_words import say


def add_dead_letters(commands: Commands) -> None:
    """Add ``dead-letters`` to the command line."""
    text = "Messages that made an actor fail are kept aside, with the reason; their clients have got a 500."
    parser = commands.add(
        "dead-letters",
        run_dead_letters,
        help="list, show, send again or drop messages that could not be processed",
        description=text,
        epilog=SETTINGS_EPILOG,
    )
    actions = Commands(parser, "action")
    for name, what in (
        ("list", "one line each, the oldest first"),
        ("show", "everything about some, with the message"),
        ("requeue", "send some to the actors again, once what made them fail is mended"),
        ("drop", "remove some for good"),
    ):
        action = actions.add(name, help=what, description=what.capitalize() + ".")
        if name != "list":
            action.add_argument("letters", nargs="*", metavar="STAGE/ID", help="as `list` shows them, or STAGE for all")
            action.add_argument("--all", action="store_true", help="those of all stages")
        action.add_argument("--json", action="store_true", help="a JSON array on standard output")
        add_bus_arguments(action)


def run_dead_letters(arguments: argparse.Namespace) -> int:
    """Do what is asked; returns the exit code (1: a letter is not there, or cannot be sent again, or the bus does not
    answer).

    Raises:
        SettingsError: no bus is given.
    """
    from pagebus.actors.commands.dead_letters import act
    from pagebus.actors.runtime.process import make_bus
    from pagebus.bus.contract import BusError
    from pagebus.bus.streams import Names

    settings = load_settings(arguments)
    bus = make_bus(settings)
    try:
        return asyncio.run(act(arguments, bus, Names(settings.name)))
    except BusError as error:
        say(error)
        return 1
