"""vLLM's flags on our command lines: other names of settings, and flags for which there is no setting here.

What asks for how things are anyway is taken, with a note; what cannot be had is refused, with a word about what there
is instead (:mod:`pagebus.actors.settings.vllm_rows`). Flags that take JSON may also be written with dots
(``--structured-outputs-config.backend guidance``); of those objects, each field is looked at by itself
(:mod:`pagebus.actors.settings.vllm_objects`). All of it also holds for the arguments of ``LLM``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from pagebus.actors.settings.declaring import SettingsError
from pagebus.actors.settings.vllm_objects import settings_in, takes_object
from pagebus.actors.settings.vllm_rows import ALIASES, ANY, FLAGS, REFUSED, SWITCHES, TAKEN, Flag

__all__ = ["ALIASES", "ANY", "FLAGS", "REFUSED", "TAKEN", "Flag", "add_foreign", "add_other_names", "is_foreign",
           "settings_of", "undotted"]  # fmt: skip
HIDDEN: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}


def add_foreign(parser: argparse.ArgumentParser) -> None:
    """Have ``parser`` know the flags without a setting, though its help does not show them."""
    for name, flag in FLAGS.items():
        nargs = 0 if flag.switch else None
        parser.add_argument(name, action=_Foreign, nargs=nargs, dest="_", **HIDDEN)
    for name in opposites():
        parser.add_argument(name, action=_Opposite, nargs=0, dest="_", **HIDDEN)


def add_other_names(parser: argparse.ArgumentParser, settings: Container[str]) -> None:
    """Have ``parser`` know vLLM's names of these settings of ours."""
    for name, setting in ALIASES.items():
        if setting in settings:
            how: dict[str, Any] = {"action": "store_true"} if setting in SWITCHES else {}
            parser.add_argument(name, dest=setting, **how, **HIDDEN)


def opposites() -> Iterator[str]:
    """``--no-fully-sharded-loras``: each switch has an opposite, which changes nothing unless it is a flag itself."""
    for name, flag in FLAGS.items():
        opposite = "--no-" + name[2:]
        if flag.switch and name.startswith("--") and not name.startswith("--no-") and opposite not in FLAGS:
            yield opposite


class _Foreign(argparse.Action):
    """A note on standard error, the settings that an object holds, or the end of the command."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option: str | None = None,
    ) -> None:
        name = option or ""
        flag = FLAGS[name]
        if takes_object(name):
            try:
                for setting, value in settings_in(name, str(values), flag.text).items():
                    setattr(namespace, setting, value)
            except SettingsError as error:
                parser.exit(2, f"pagebus: {error}\n")
        elif not flag.takes(str(values)):
            parser.exit(2, f"pagebus: {option}: {flag.text}\n")
        elif flag.taken == ANY:
            print(f"pagebus: {option} changes nothing: {flag.text}", file=sys.stderr)


class _Opposite(argparse.Action):
    """The opposite of a flag. It is accepted silently if the flag is refused anyway; if the flag always holds, a note
    on standard error says that it changes nothing."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, __: object, option: str | None = None) -> None:
        flag = FLAGS["--" + (option or "").removeprefix("--no-")]
        if flag.taken == ANY:
            print(f"pagebus: {option} changes nothing: {flag.text}", file=sys.stderr)


def undotted(words: Sequence[str]) -> list[str]:
    """``--a.b.c 5`` as ``--a {"b": {"c": 5}}``, for flags that take an object; without a value it is true."""
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        flag, dot, path = name.partition(".")
        if not (dot and takes_object(flag)):
            found.append(word)
            continue
        if not equals:
            value = "true" if not rest or rest[0].startswith("-") else rest.pop(0)
        found += [flag, json.dumps(_nested(path.split("."), value))]
    return found


def _nested(path: Sequence[str], text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    for key in reversed(path):
        value = {key.replace("-", "_"): value}
    return value


def in_its_place(name: str) -> str:
    """What there is in place of one of vLLM's flags, which only the command line and ``LLM`` take, by the name that it
    would have as a setting; "": vLLM has no such flag."""
    option = "--" + name.replace("_", "-")
    if option in ALIASES:
        return f"its name here is {ALIASES[option]}"
    if takes_object(option):
        return f"only the command line takes {option}"
    return FLAGS[option].text if option in FLAGS else ""


def settings_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that arguments of ``LLM`` are, which go by vLLM's names.

    Raises:
        TypeError: one of them holds what cannot be had.
    """
    told: dict[str, Any] = {}
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if flag in ALIASES and value is not None:
            told[ALIASES[flag]] = value
        elif takes_object(flag) and value is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            try:
                told |= settings_in(flag, text, FLAGS[flag].text)
            except SettingsError as error:
                raise TypeError(str(error).replace(flag, name, 1)) from error
    return told


def is_foreign(name: str, value: Any) -> bool:
    """Whether an argument of ``LLM`` is one of vLLM's without a setting here, that changes nothing.

    Raises:
        TypeError: it is one of them that cannot be had.
    """
    option = "--" + name.replace("_", "-")
    flag = FLAGS.get(option)
    if option in ALIASES or takes_object(option):
        return True
    if flag is None:
        return False
    if value is False and (off := FLAGS.get("--no-" + option[2:])) is not None and off.taken != ANY:
        raise TypeError(f"{name}: {off.text}")
    if value not in (None, False) and not flag.takes(str(value)):
        raise TypeError(f"{name}: {flag.text}")
    return True
