"""Detects whether a raw prompt, written without a chat template, ends within reasoning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from tokenizers import Tokenizer

from pagebus.actors.model.reasoning import FORMATS
from pagebus.bus.messages import Int32Array, StructuredOutput


def thought_in(ids: Int32Array, tokenizer: Tokenizer, reasoning: str) -> int:
    """How many tokens of ``ids`` [P] stand behind the mark that opened the reasoning at its end; -1: there is none, or
    its marks are not a token each."""
    form = FORMATS[reasoning]
    opened = _last(ids, tokenizer, form.opens)
    return len(ids) - opened - 1 if opened > _last(ids, tokenizer, form.closes) else -1


def _last(ids: Int32Array, tokenizer: Tokenizer, marks: Sequence[str]) -> int:
    """The last place of one of ``marks``; -1: there is none."""
    tokens = [token for mark in marks if (token := tokenizer.token_to_id(mark)) is not None]
    places = np.isin(ids, tokens).nonzero()[0]
    return int(places[-1]) if len(places) else -1


def behind_prompt(wanted: StructuredOutput, num_thought: int) -> StructuredOutput:
    """``wanted`` behind a prompt that ends with ``num_thought`` tokens of reasoning (-1: with none)."""
    budget = wanted.thinking_tokens
    if wanted.kind == "anything":
        return replace(wanted, prompt_thought=num_thought)
    if num_thought < 0:
        return replace(wanted, reasoning="", thinking_tokens=None, prompt_thought=None)
    left = None if budget is None else max(0, budget - num_thought)
    return replace(wanted, thinking_tokens=left, prompt_thought=0)
