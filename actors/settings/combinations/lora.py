"""Settings of adapters that only make sense together, and the adapters that they name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pagebus.actors.settings.declaring import SettingsError

if TYPE_CHECKING:
    from pagebus.actors.settings.engine import EngineSettings

FIELDS = {"name", "path", "base_model_name"}
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("experts", "embed_tokens", "lm_head", "bias"),
)
"""Ends of names of modules that adapters may change, experts' all by one word; and whether these may have biases."""


def check_lora(settings: EngineSettings) -> None:
    """Check what is said of adapters.

    Raises:
        SettingsError: something is missing, does not go together, or is not served yet.
    """
    if not settings.enable_lora:
        for name in ("lora_modules", "lora_resolver_cache_dir", "lora_target_modules"):
            if getattr(settings, name):
                raise SettingsError(f"--{name.replace('_', '-')} needs --enable-lora")
        return
    if settings.max_cpu_loras is not None and settings.max_cpu_loras < settings.max_loras:
        raise SettingsError(f"--max-cpu-loras {settings.max_cpu_loras}: must be at least --max-loras")
    for name in settings.lora_target_modules:
        if name not in TARGETS:
            raise SettingsError(f"--lora-target-modules {name!r}: choose from {', '.join(TARGETS)}")
    named_adapters(settings.lora_modules)


def named_adapters(modules: tuple[str, ...]) -> dict[str, str]:
    """The paths of the adapters of ``--lora-modules``, by name.

    Raises:
        SettingsError: one is neither NAME=PATH nor such an object, or a name occurs twice.
    """
    found: dict[str, str] = {}
    for text in modules:
        name, path = _named(text)
        if not name or not path:
            raise SettingsError(f"--lora-modules {text!r}: write NAME=PATH")
        if name in found:
            raise SettingsError(f"--lora-modules: {name!r} is there twice")
        found[name] = path
    return found


def _named(text: str) -> tuple[str, str]:
    if not text.startswith("{"):
        name, _, path = text.partition("=")
        return name, path
    try:
        fields: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--lora-modules {text!r}: no JSON") from error
    if unknown := sorted(fields.keys() - FIELDS):
        raise SettingsError(f"--lora-modules: {unknown[0]!r} is none of {', '.join(sorted(FIELDS))}")
    given = fields.get("name"), fields.get("path")
    if not all(isinstance(each, str) for each in given):
        raise SettingsError(f"--lora-modules {text!r}: name and path must be strings")
    return str(given[0]), str(given[1])
