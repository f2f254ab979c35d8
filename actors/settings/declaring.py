"""Declares a setting: a field with a default, a help text and bounds, and the validation of values against these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar

T = TypeVar("T")


class SettingsError(ValueError):
    """A setting that is unknown, out of bounds or in conflict with another; the text names the flag."""


def flag_of(name: str) -> str:
    """``max_model_len`` -> ``--max-model-len``; the model is a positional argument."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def setting(
    default: T,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    check: Callable[[Any], str | None] | None = None,
    secret: bool = False,
) -> T:
    """One field. ``low`` and ``high`` are inclusive; ``check`` returns what is wrong with a value, or None.

    A ``secret`` is handed to child processes in the environment, never on a command line.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "choices": tuple(choices),
        "check": check,
        "secret": secret,
    }
    return field(default=default, metadata=metadata)


def check_value(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Bounds, choices and the field's own check."""
    flag = flag_of(name)
    low, high, choices, check = (metadata[key] for key in ("low", "high", "choices", "check"))
    if choices and value not in choices:
        raise SettingsError(f"{flag} {value!r}: choose one of {', '.join(choices)}")
    if isinstance(value, float) and value != value:
        raise SettingsError(f"{flag}: not a number")
    if low is not None and value < low:
        raise SettingsError(f"{flag} {value}: must be at least {low}")
    if high is not None and value > high:
        raise SettingsError(f"{flag} {value}: must be at most {high}")
    problem = check(value) if check is not None else None
    if problem:
        hidden = metadata["secret"] or "@" in str(value)  # a URL may have a password
        raise SettingsError(f"{flag}{'' if hidden else f' {value!r}'}: {problem}")
