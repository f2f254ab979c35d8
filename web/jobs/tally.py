"""Totals of a batch's answers: the model that gave them, and their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Tally:
    """Totals of the lines of the output file, in OpenAI's shape of a batch's ``usage``."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._input = self._cached = self._output = self._reasoning = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line; errors count nothing."""
        body = (line.get("response") or {}).get("body") or {}
        usage = body.get("usage")
        if usage is None:
            return
        self.model = self.model or body.get("model")
        self._input += usage["prompt_tokens"]
        self._output += usage.get("completion_tokens") or 0
        self._cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self._reasoning += (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0

    def shown(self) -> dict[str, Any]:
        """The fields of the batch's record."""
        usage = {
            "input_tokens": self._input,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens": self._output,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": self._input + self._output,
        }
        return {"model": self.model, "usage": usage}
