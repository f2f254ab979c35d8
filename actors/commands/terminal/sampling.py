"""Options of ``chat`` and ``complete`` that become fields of the request, under the API's names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from pagebus.actors.settings import SettingsError
from pagebus.actors.settings.command_line import number

FIELDS: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "most tokens of an answer"),
    "temperature": (number, "0: always the most likely token; more: more varied"),
    "top_p": (number, "draw from the most likely tokens that together have this probability"),
    "top_k": (int, "draw from so many of the most likely tokens"),
    "min_p": (number, "leave out tokens with less than this share of the best one's probability"),
    "presence_penalty": (number, "against tokens that have come"),
    "frequency_penalty": (number, "against tokens, for each time that they have come"),
    "repetition_penalty": (number, "against tokens of prompt and output; 1: none"),
    "seed": (int, "the same seed draws the same tokens"),
    "stop": (str, "end before this text"),
}


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """A flag per field; one that is not given is left to the server."""
    group = parser.add_argument_group("sampling", "what is not given is up to the server")
    for name, (kind, text) in FIELDS.items():
        flag = "--" + name.replace("_", "-")
        action = "append" if name == "stop" else "store"
        group.add_argument(flag, type=kind, action=action, metavar=name.rsplit("_", 1)[-1].upper(), help=text)


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given."""
    found = {name: getattr(arguments, name) for name in FIELDS}
    return {name: value for name, value in found.items() if value is not None}


def parse_field(name: str, text: str) -> Any:
    """A value for a field, from text.

    Raises:
        SettingsError: there is no such field, or the text is not of its type.
    """
    name = name.replace("-", "_")
    if name not in FIELDS:
        raise SettingsError(f"{name}: there is no such option; choose one of {', '.join(FIELDS)}")
    kind = FIELDS[name][0]
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(f"{name}: {text!r} is not a {'whole number' if kind is int else 'number'}") from None
