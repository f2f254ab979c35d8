"""Fixed texts in a grammar. Parts of a text that are single special tokens must be named as tokens, not as their text.

llguidance keeps tokens that are special, or added and written ``<...>``, apart from all text, so that text cannot
become one of them. A model trained with such a token writes the token, and never its text.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when the first grammar comes
    from llguidance import LLTokenizer


class Literals:
    """Writes texts for one vocabulary; without one, all of them are plain text."""

    def __init__(self, vocabulary: LLTokenizer | None) -> None:
        self._vocabulary = vocabulary

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """The parts of ``text``, each with the id of the token that it is, or None for text."""
        tokens = self.tokens_in(text)
        if not tokens:
            return [(text, None)] if text else []
        pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        return [(part, tokens.get(part)) for part in re.split(f"({pattern})", text) if part]

    def token(self, text: str) -> int | None:
        """The token that all of ``text`` is; None if it is none."""
        parts = self.split(text)
        return parts[0][1] if len(parts) == 1 else None

    def lark(self, text: str) -> str:
        """``text`` as an expression; empty for an empty text."""
        return " ".join(quoted(part) if token is None else f"<[{token}]>" for part, token in self.split(text))

    def any_of(self, texts: tuple[str, ...]) -> str:
        """One of ``texts`` as an expression."""
        return f"({' | '.join(self.lark(text) for text in texts)})"

    def tokens_in(self, text: str) -> dict[str, int]:
        """The special tokens whose names stand in ``text``."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return {}
        tokens = set(vocabulary.tokenize_str(text, parse_special=True))
        special = {vocabulary.decode_str([token]): token for token in tokens if vocabulary.is_special_token(token)}
        return {name: token for name, token in special.items() if name and name in text}

    @property
    def ends(self) -> list[int]:
        """The tokens that end an output."""
        return [] if self._vocabulary is None else list(self._vocabulary.eos_tokens)


def quoted(text: str) -> str:
    """``text`` as a string of Lark."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """``text`` for use within ``/.../``."""
    return re.escape(text).replace("/", "\\/")


def without(texts: list[str]) -> str:
    """The expression of a terminal that is any text in which none of ``texts`` stands."""
    if not texts:
        return "/(?s:.*)/"
    return f"/(?s:.*)/ & ~/(?s:.*)({'|'.join(map(pattern, texts))})(?s:.*)/"
