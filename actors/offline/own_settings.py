"""The settings that an `LLM` takes: those of `pagebus serve`, but for what only concerns servers."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from pagebus.actors.settings import Settings
from pagebus.actors.settings.sources import field_types, typed_value
from pagebus.actors.settings.vllm_flags import is_foreign, settings_of

OWN = ("host", "port", "api_key", "api_key_file", "bus", "ingresses", "schedulers", "job_actors")
"""Settings of a deployment that others can reach, which an `LLM` is not."""


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by our names, with their types, and without vLLM's arguments that change nothing. None means that a
    setting was not given.

    Raises:
        TypeError: there is no such setting.
        SettingsError: a number or a switch is none.
    """
    own = {name: value for name, value in settings.items() if not is_foreign(name, value)}
    settings = own | settings_of(settings)
    known = {spec.name for spec in dataclasses.fields(Settings)} - {*OWN, "model"}
    for name in settings:
        if name in OWN:
            raise TypeError(f"{name} is a setting of servers: an LLM answers this program alone")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise TypeError(f"{name}: there is no such setting" + (f" (did you mean {close[0]}?)" if close else ""))
    kinds = field_types()
    return {
        name: typed_value(name, value, name) if kinds[name][0] in (bool, int, float) and value is not None else value
        for name, value in settings.items()
        if value is not None or kinds[name][1]
    }
