"""Whether the requests of workloads are short enough for the model that is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pagebus.actors.bench.driver.deployment import as_served, scratch
from pagebus.actors.bench.driver.points import Workload
from pagebus.actors.model.config import ModelConfig, max_positions
from pagebus.actors.settings import Settings, SettingsError


def fitted(workloads: Mapping[str, Workload], settings: Settings, scale: float) -> dict[str, Workload]:
    """The workloads, none of which asks for a longer context than the model has. ``scale``: what their lengths were
    multiplied with.

    Raises:
        SettingsError: a request is longer; the text says what makes all of them fit.
    """
    most = settings.max_model_len or positions_of(settings)
    needed = {name: longest(workload) for name, workload in workloads.items()}
    for name, tokens in needed.items():
        if tokens > most:
            fits = rounded_down(scale * most / max(needed.values()))
            raise SettingsError(
                f"--workloads {name}: a prompt and its output have up to {tokens} tokens, and the context holds "
                f"{most}; --scale {fits:g} shortens all requests until they fit"
            )
    return {
        name: replace(each, settings={**each.settings, "max_model_len": min(each.settings["max_model_len"], most)})
        for name, each in workloads.items()
    }


def positions_of(settings: Settings) -> int:
    """The longest context of the model."""
    with scratch() as folder:
        served = as_served(settings, folder)
        return max_positions(ModelConfig.of(served))


def longest(workload: Workload) -> int:
    """Tokens of the longest prompt with its output."""
    return max(int((each.trace.prompt_tokens + each.trace.output_tokens).max()) for each in workload.points)


def rounded_down(scale: float) -> float:
    """To two digits: lengths are rounded to whole tokens, so what fits exactly may not."""
    unit = 10.0 ** (math.floor(math.log10(scale)) - 1)
    return math.floor(scale / unit) * unit
