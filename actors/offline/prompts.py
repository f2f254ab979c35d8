"""Prompts as programs give them: a text, token ids, or either by name."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or either by name as in vLLM: ``{"prompt": ...}``, ``{"prompt_token_ids": ...}``."""
Found: TypeAlias = tuple[str | None, str | list[int]]
"""The text of a prompt, if it has one, and what is sent for it."""
NAMES = ("prompt", "prompt_token_ids")


def is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt, not several."""
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def find(prompt: Prompt) -> Found:
    """A prompt in any of its forms.

    Raises:
        ValueError: it has none of these forms, or fields beyond them.
    """
    given: Any = prompt
    if isinstance(prompt, Mapping):
        more = [name for name, value in prompt.items() if name not in NAMES and value is not None]
        if more:  # an image, or a salt: what the prompt means without it was not asked for
            raise ValueError(f"{more[0]}: not supported in a prompt, which has `prompt` or `prompt_token_ids`")
        given = prompt.get("prompt_token_ids") or prompt.get("prompt")
        if given is None:
            raise ValueError("a prompt must have `prompt` or `prompt_token_ids`")
    if isinstance(given, str):
        return given, given
    try:
        return None, [operator.index(each) for each in given]
    except TypeError:
        raise ValueError(f"a prompt must be a text or a list of token ids, got {str(given)[:60]!r}") from None
