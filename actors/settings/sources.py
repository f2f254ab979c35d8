"""Settings from the command line, the environment and a TOML file, and back to a command line for child processes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tomllib
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from pagebus.actors.settings.declaring import SettingsError, flag_of
from pagebus.actors.settings.settings import GROUPS, Settings
from pagebus.actors.settings.vllm_flags import add_foreign, add_other_names, in_its_place

MODEL_FLAG = "model_flag"
ENV_PREFIX = "PAGEBUS_"
ENV_CONFIG = "PAGEBUS_CONFIG"
ENV_TESTS = "PAGEBUS_TEST_"
SHARED_BUS_HELP = "URL of the bus that all actors share: redis://, rediss://, unix:// or redis+sentinel://"
BUS_SETTINGS = (
    "name", "bus", "redis_password", "redis_ca_file", "redis_cert_file", "redis_key_file", "allow_open_redis"
)  # fmt: skip
"""Of a command that reads the bus of a deployment."""
MULTIPLIERS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_int(text: str) -> int:
    """``4096``, ``4k`` (4000), ``4K`` (4096), ``1.5M``: vLLM's forms.

    Raises:
        ValueError: anything else.
    """
    text = text.strip()
    if text and text[-1] in MULTIPLIERS:
        number = float(text[:-1]) * MULTIPLIERS[text[-1]]
        if number != int(number):
            raise ValueError(f"{text!r} is not a whole number")
        return int(number)
    return int(text)


def parse_bool(text: str) -> bool:
    """``1 true yes on`` and ``0 false no off``, in any case.

    Raises:
        ValueError: anything else.
    """
    lowered = text.strip().lower()
    if lowered in TRUE:
        return True
    if lowered in FALSE:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


@cache
def field_types() -> dict[str, tuple[type, bool]]:
    """For each setting its type (str, int, float, bool, tuple) and whether None is allowed."""
    kinds: dict[str, tuple[type, bool]] = {}
    for name, hint in typing.get_type_hints(Settings).items():
        optional = isinstance(hint, types.UnionType)
        plain = next(arg for arg in typing.get_args(hint) if arg is not type(None)) if optional else hint
        kinds[name] = (typing.get_origin(plain) or plain, optional)
    return kinds


def parse_value(name: str, text: str, origin: str) -> Any:
    """The value of setting ``name`` from text; lists are separated by commas; ``auto`` and ``none`` mean None.

    Raises:
        SettingsError: not of the setting's type; the message names ``origin``, where the text came from.
    """
    kind, optional = field_types()[name]
    if optional and kind in (int, float) and text.strip().lower() in ("auto", "none", "-1"):
        return None
    try:
        if kind is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if kind is bool:
            return parse_bool(text)
        return parse_int(text) if kind is int else kind(text)
    except ValueError as error:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, kind.__name__)
        raise SettingsError(f"{origin}: {text!r} is not {wanted}") from error


# -- command line -----------------------------------------------------------------------------------------------------


def add_bus_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the settings with which a command finds a deployment that is there."""
    add_arguments(parser, model=False, only=BUS_SETTINGS, texts={"bus": f"{SHARED_BUS_HELP} (required)"})


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    model: bool = True,
    only: Collection[str] = (),
    texts: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Add every setting, or ``only`` some, to ``parser``, grouped; what is not given leaves no attribute behind.
    ``texts``: the help of those that mean something else here."""
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    for name, settings in GROUPS.items():
        specs = [spec for spec in dataclasses.fields(settings) if not only or spec.name in only]
        if not specs:
            continue
        group = parser.add_argument_group(name, settings.__doc__)
        for spec in specs:
            if spec.name != "model":
                _add_flag(group, spec.name, spec.metadata["choices"], texts.get(spec.name) or _help_text(spec))
            elif model:
                text = _help_text(spec)
                group.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=text)
                text = "the same as MODEL, which counts if both are given"
                group.add_argument("--model", dest=MODEL_FLAG, metavar="MODEL", default=argparse.SUPPRESS, help=text)
    add_other_names(parser, only or field_types())
    if not only:
        add_foreign(parser)


def _help_text(spec: dataclasses.Field[Any]) -> str:
    text = str(spec.metadata["help"])
    if spec.default not in (None, "", ()) and not isinstance(spec.default, bool):
        text += f" (default: {spec.default})"
    elif isinstance(spec.default, bool):
        text += f" (default: {'on' if spec.default else 'off'})"
    return text.replace("%", "%%")


def _add_flag(group: argparse._ArgumentGroup, name: str, choices: Sequence[str], text: str) -> None:
    kind, _ = field_types()[name]
    flag, metavar = flag_of(name), name.split("_per_")[0].rsplit("_", 1)[-1].upper()
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif kind is tuple:
        group.add_argument(flag, nargs="+", action="extend", metavar=metavar, **common)
    else:
        group.add_argument(flag, metavar="{" + ",".join(choices) + "}" if choices else metavar, **common)


# -- environment and file ---------------------------------------------------------------------------------------------


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Settings given as ``PAGEBUS_...``; an empty value counts as not given.

    Raises:
        SettingsError: a variable with our prefix that is no setting, or a malformed value.
    """
    known = {ENV_PREFIX + name.upper(): name for name in field_types()}
    found: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_CONFIG or variable.startswith(ENV_TESTS):
            continue
        if variable not in known:
            advice = in_its_place(variable.removeprefix(ENV_PREFIX).lower())
            raise SettingsError(f"{variable}: there is no such setting{_suggestion(variable, known, advice)}")
        if text != "":
            found[known[variable]] = parse_value(known[variable], text, variable)
    return found


def from_file(path: str) -> dict[str, Any]:
    """Settings in a TOML file: a flat table.

    Raises:
        SettingsError: the file cannot be read or parsed, holds an unknown key or a value of the wrong type.
    """
    if path.endswith((".yaml", ".yml")):
        raise SettingsError(f"--config {path}: settings are read from TOML: `max_model_len = 4096`, a line for each")
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from error
    kinds = field_types()
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise SettingsError(
                f"{path}: {key}: there is no such setting{_suggestion(name, kinds, in_its_place(name))}"
            )
        found[name] = typed_value(name, value, f"{path}: {key}")
    return found


def typed_value(name: str, value: Any, origin: str) -> Any:
    """The value of setting ``name`` from one of TOML's or Python's.

    Raises:
        SettingsError: not of the setting's type; the message names ``origin``.
    """
    kind, _ = field_types()[name]
    if kind is tuple and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return tuple(value)
    if kind is tuple and isinstance(value, str):
        return (value,)
    if isinstance(value, str):
        return value if kind is str else parse_value(name, value, origin)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is kind:
        return value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list of strings"}
    raise SettingsError(f"{origin}: {value!r} is not {wanted.get(kind, 'a string')}")


def unknown_option(option: str, known: Iterable[str]) -> str:
    """What to say of an option that is not among the ``known`` ones of a command."""
    name = option.partition("=")[0]
    return f"{name}: there is no such option" + _suggestion(name, dict.fromkeys(known))


def _suggestion(name: str, known: Mapping[str, Any], advice: str = "") -> str:
    import difflib

    if advice:
        return f": {advice}"
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def load_settings(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from parsed arguments, the environment and the file that either of them names.

    Raises:
        SettingsError: see :class:`Settings`.
    """
    environ = os.environ if environ is None else environ
    kinds = field_types()
    given: dict[str, Any] = {}
    if MODEL_FLAG in arguments:
        given["model"] = getattr(arguments, MODEL_FLAG)
    for name, value in vars(arguments).items():
        if name in kinds:
            given[name] = _argument_value(name, value)
    path = getattr(arguments, "config", None) or environ.get(ENV_CONFIG)
    merged = {**(from_file(path) if path else {}), **from_environment(environ), **given}
    return Settings(**merged)


def _argument_value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(each for part in value for each in _listed(part))
    return parse_value(name, value, flag_of(name)) if isinstance(value, str) else value


def _listed(text: str) -> Sequence[str]:
    """A value, or those of an array in JSON, as vLLM takes origins."""
    try:
        given = json.loads(text) if text.startswith("[") else None
    except ValueError:
        given = None
    return given if isinstance(given, list) and all(isinstance(each, str) for each in given) else (text,)


# -- back to a command line -------------------------------------------------------------------------------------------


def is_secret(name: str, value: Any) -> bool:
    """Whether this value must not show in a list of processes: API keys, and bus URLs with a password."""
    spec = next(spec for spec in dataclasses.fields(Settings) if spec.name == name)
    return bool(spec.metadata["secret"]) or (name == "bus" and urlsplit(str(value)).password is not None)


def to_args(settings: Settings) -> list[str]:
    """See :meth:`Settings.to_args`."""
    arguments: list[str] = []
    for name, value in _changed(settings):
        if is_secret(name, value):
            continue
        if name == "model":
            arguments.insert(0, value)
        elif isinstance(value, bool):
            arguments.append(flag_of(name) if value else "--no-" + flag_of(name)[2:])
        else:
            parts = value if isinstance(value, tuple) else (value,)
            arguments += [f"{flag_of(name)}={part}" for part in parts]
    return arguments


def to_env(settings: Settings) -> dict[str, str]:
    """See :meth:`Settings.to_env`."""
    secrets = {name: value for name, value in _changed(settings) if is_secret(name, value)}
    return {
        ENV_PREFIX + name.upper(): ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in secrets.items()
    }


def _changed(settings: Settings) -> list[tuple[str, Any]]:
    values = [(spec.name, getattr(settings, spec.name), spec.default) for spec in dataclasses.fields(settings)]
    return [(name, value) for name, value, default in values if value != default]


def child_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a child that gets ``settings.to_args()``: other settings removed, secrets added."""
    kept = {key: value for key, value in environ.items() if not key.startswith(ENV_PREFIX) or key.startswith(ENV_TESTS)}
    return {**kept, **to_env(settings)}


def shown(settings: Settings) -> dict[str, Any]:
    """All settings as JSON, for people: secrets, and URLs that hold a password, are only said to be set."""
    told: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        hidden = field.metadata["secret"] or any(mark in str(value) for mark in ("@", "password="))
        told[field.name] = "***" if value and hidden else value
    return told
