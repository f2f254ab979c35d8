"""Settings of speculation that only make sense together, with vLLM's rules and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagebus.actors.settings.declaring import SettingsError

if TYPE_CHECKING:
    from pagebus.actors.settings.engine import EngineSettings

LOOKUP_TOKENS = 5
"""The longest and shortest end that is looked up, where nothing is said."""


def check_speculation(settings: EngineSettings) -> None:
    """Check what is said of drafts.

    Raises:
        SettingsError: something is missing, or does not go together.
    """
    if settings.spec_method == "none":
        if settings.spec_tokens is not None:
            raise SettingsError("num_speculative_tokens (--spec-tokens) needs a method (--spec-method)")
        if settings.spec_model is not None:
            raise SettingsError("a model that guesses (--spec-model) needs a method (--spec-method)")
        return
    if settings.spec_tokens is None and settings.spec_method != "mtp":
        raise SettingsError(f"--spec-method {settings.spec_method}: num_speculative_tokens (--spec-tokens) is missing")
    given = settings.prompt_lookup_max, settings.prompt_lookup_min
    if settings.spec_method != "ngram" and given != (None, None):
        raise SettingsError(
            f"--spec-method {settings.spec_method}: prompt_lookup_max and prompt_lookup_min are of ngram only"
        )
    if settings.spec_method != "eagle3" and settings.spec_model is not None:
        raise SettingsError(f"--spec-method {settings.spec_method} needs no model (--spec-model)")
    longest, shortest = lookup_sizes(settings)
    if shortest > longest:
        raise SettingsError(f"prompt_lookup_min={shortest} cannot be larger than prompt_lookup_max={longest}")


def lookup_sizes(settings: EngineSettings) -> tuple[int, int]:
    """The longest and the shortest end of a sequence that is looked up. If one is not given it is as the other."""
    longest, shortest = settings.prompt_lookup_max, settings.prompt_lookup_min
    if longest is None:
        longest = LOOKUP_TOKENS if shortest is None else shortest
    return longest, longest if shortest is None else shortest
