"""What is said of speculation: settings that only make sense together, with vLLM's rules, and what holds by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagebus.actors.settings.declaring import SettingsError

if TYPE_CHECKING:
    from pagebus.actors.settings.engine import EngineSettings

DEFAULT_TOKENS = 4
DEFAULT_LOOKUP = 5, 3
WITH_MODEL = "eagle3", "draft_model"
"""Methods of which another model guesses."""
LOOKUP_TOKENS = 5
"""The longest and shortest end that is looked up, where ngram is asked for and nothing is said of them: vLLM's."""


class Speculation(NamedTuple):
    """How next tokens are guessed: by ``method``, ``tokens`` at most. The lookup seeks ends from the ``longest`` to the
    ``shortest``."""

    method: str
    tokens: int
    longest: int
    shortest: int


def speculation(settings: EngineSettings) -> Speculation:
    """What is meant. Where no method is given it is a lookup. MTP without a number has 0 tokens: the model knows it."""
    method = settings.spec_method or "ngram"
    tokens = settings.spec_tokens or (DEFAULT_TOKENS if method == "ngram" else 0)
    return Speculation(method, tokens, *_lookup_sizes(settings))


def check_speculation(settings: EngineSettings, ranks: int) -> None:
    """Check what is said of drafts, for so many ranks.

    Raises:
        SettingsError: something is missing, or does not go together.
    """
    method = settings.spec_method
    if method == "none" and settings.spec_tokens is not None:
        raise SettingsError("num_speculative_tokens (--spec-tokens) needs a method (--spec-method)")
    if method in (None, "none") and settings.spec_model is not None:
        raise SettingsError("a model that guesses (--spec-model) needs a method (--spec-method)")
    if method in WITH_MODEL and settings.spec_tokens is None:
        raise SettingsError(f"--spec-method {method}: num_speculative_tokens (--spec-tokens) is missing")
    if method == "draft_model" and settings.spec_model is None:
        raise SettingsError("--spec-method draft_model: model (--spec-model) is missing")
    given = settings.prompt_lookup_max, settings.prompt_lookup_min
    if method in (*WITH_MODEL, "mtp") and given != (None, None):
        raise SettingsError(f"--spec-method {method}: prompt_lookup_max and prompt_lookup_min are of ngram only")
    if method not in WITH_MODEL and settings.spec_model is not None:
        raise SettingsError(f"--spec-method {method} needs no model (--spec-model)")
    divided = settings.draft_tensor_parallel_size
    if method in (*WITH_MODEL, "mtp") and divided not in (None, ranks):
        raise SettingsError(
            f"draft_tensor_parallel_size={divided}: what guesses is divided among as many ranks as the model is, "
            f"{ranks} (--tensor-parallel-size)"
        )
    longest, shortest = _lookup_sizes(settings)
    if shortest > longest:
        raise SettingsError(f"prompt_lookup_min={shortest} cannot be larger than prompt_lookup_max={longest}")


def _lookup_sizes(settings: EngineSettings) -> tuple[int, int]:
    """The longest and the shortest end of a sequence that is looked up. If one is not given it is as the other."""
    longest, shortest = settings.prompt_lookup_max, settings.prompt_lookup_min
    if longest is None and shortest is None and settings.spec_method is None:
        return DEFAULT_LOOKUP
    if longest is None:
        longest = LOOKUP_TOKENS if shortest is None else shortest
    return longest, longest if shortest is None else shortest
